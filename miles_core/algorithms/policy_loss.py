"""Clipped policy losses on token ratios."""

from typing import NamedTuple

import torch
from torch import Tensor

from miles_core.algorithms.masking import bounded_exp, masked


class ClippedLoss(NamedTuple):
    """Per-token result of a loss with a clipped branch, not yet weighted."""

    loss: Tensor  # [N], 0 at masked tokens
    clipped: Tensor  # bool [N], where the clipped branch was taken


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """L = max(-ratio * A, -clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = exp(clamp(log_ratio, +-20)).

    With `dual_clip` c > 1 and A < 0: L = min(L, -c * A), which bounds the loss where the ratio runs away.
    Sources: PPO (arXiv 1707.06347), eq. 7; separate upper bound: DAPO (arXiv 2503.14476); dual clip: arXiv 1912.09729.
    """
    ratio = bounded_exp(masked(log_ratio, mask))
    advantages = masked(advantages, mask)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return ClippedLoss(loss, clipped > unclipped)


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """`clipped_surrogate` of each token's own ratio exp(log_probs - old_log_probs)."""
    return clipped_surrogate(
        masked(log_probs - old_log_probs, mask),
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
