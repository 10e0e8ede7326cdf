"""Off-policy sequence masking (OPSM)."""

from torch import Tensor

from miles_core.algorithms.masking import sequence_mean


def off_policy_sequence_mask(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, sequence_ids: Tensor, *, delta: float
) -> Tensor:
    """bool [N]: trainable tokens with A < 0 of sequences from which the policy has moved away by more than `delta`,
    mean over the sequence's trainable tokens of (old_log_probs - log_probs).

    Pushing down what the policy no longer samples teaches nothing and destabilises.
    Source: DeepSeek-V3.2 report, 2025, "off-policy sequence masking".
    """
    drift = sequence_mean((old_log_probs - log_probs).detach(), mask, sequence_ids)
    return mask & (advantages < 0) & (drift > delta)
