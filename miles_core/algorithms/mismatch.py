"""How far rollout and training log-probs are apart. Reported in every run, corrected or not."""

from torch import Tensor

from miles_core.algorithms.kl import kl_divergence
from miles_core.algorithms.masking import masked


def logprob_abs_diff(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """|old - rollout| of each token, [N]."""
    return masked(old_log_probs - rollout_log_probs, mask).abs()


def mismatch_kl(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """k3 estimate of KL(rollout || old) of each token, [N]; the tokens were sampled by the rollout."""
    return kl_divergence(rollout_log_probs, old_log_probs, mask, kl_type="k3")


def effective_sample_ratio(weight_sum: float, square_sum: float, count: float) -> float:
    """(sum w)^2 / (count * sum w^2), in (0, 1]: the share of the tokens that importance weights w leave effective.

    Source: A. Kong, "A note on importance sampling using standardized weights", 1992.
    """
    return weight_sum**2 / (count * square_sum) if square_sum else 0.0
