"""GSPO: one importance ratio for the whole sequence."""

from torch import Tensor

from miles_core.algorithms.masking import masked, sequence_mean
from miles_core.algorithms.policy_loss import ClippedLoss, clipped_surrogate


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """`clipped_surrogate` with log_ratio_t = mean over the sequence's trainable tokens of (log_probs - old_log_probs).

    The value is detached and log_probs_t - detach(log_probs_t) is added, so that token t carries the gradient of its
    own log-prob. Where advantages and weights are equal over a sequence this is the gradient of the sequence loss
    itself; where they differ it is GSPO-token. Sequences must be whole: a part of one has another mean.
    Source: GSPO (arXiv 2507.18071), eq. 7 and section 4.3.
    """
    log_probs = masked(log_probs, mask)
    mean = sequence_mean(log_probs.detach() - masked(old_log_probs, mask), mask, sequence_ids)
    return clipped_surrogate(
        log_probs - log_probs.detach() + mean,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
