"""Estimators of KL(policy || reference) from the tokens that the policy sampled."""

from typing import Literal

from torch import Tensor

from miles_core.algorithms.masking import bounded_exp, masked

KLType = Literal["k1", "k2", "k3", "low_var"]

LOW_VAR_LOG_RATIO, LOW_VAR_KL = 20.0, 10.0


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, kl_type: KLType) -> Tensor:
    """KL estimate of each token, [N], 0 at masked ones. With x = log_probs - ref_log_probs:

    - k1 = x: unbiased, high variance, may be negative
    - k2 = x^2 / 2: biased, low variance; its gradient is the unbiased one on policy
    - k3 = exp(-x) - 1 + x: unbiased, never negative; only the exponent is bounded, to +-20
    - low_var = k3 of x clamped to +-20, the result clamped to +-10

    Source: J. Schulman, "Approximating KL Divergence", 2020, with r = exp(-x) the reference's probability over the
    policy's.
    """
    x = masked(log_probs - ref_log_probs, mask)
    if kl_type == "k1":
        return x
    if kl_type == "k2":
        return x.square() / 2
    if kl_type == "k3":
        return bounded_exp(-x) - 1 + x
    x = x.clamp(-LOW_VAR_LOG_RATIO, LOW_VAR_LOG_RATIO)
    return ((-x).exp() - 1 + x).clamp(-LOW_VAR_KL, LOW_VAR_KL)


def unbiased_kl(kl: Tensor, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """kl_t * exp(log_probs_t - old_log_probs_t): the KL as an expectation under the policy that sampled the tokens.

    The gradient runs through the ratio too; without it the gradient of k3 is not that of the KL.
    Source: DeepSeek-V3.2 report, 2025, "unbiased KL estimate".
    """
    return masked(kl, mask) * bounded_exp(masked(log_probs - old_log_probs, mask))
