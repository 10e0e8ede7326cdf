"""CISPO: the clipped ratio is a constant weight, so no token loses its gradient."""

from torch import Tensor

from miles_core.algorithms.masking import bounded_exp, masked
from miles_core.algorithms.policy_loss import ClippedLoss


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ClippedLoss:
    """L = -detach(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log_probs.

    The authors clip above only: clip_low = 1 leaves the lower side open.
    Source: MiniMax-M1 (arXiv 2506.13585), eq. 4.
    """
    log_probs = masked(log_probs, mask)
    ratio = bounded_exp(log_probs.detach() - masked(old_log_probs, mask))
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClippedLoss(-weight * masked(advantages, mask) * log_probs, weight != ratio)
