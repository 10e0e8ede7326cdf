"""Correction of the difference between the distribution that sampled a token and the one that trains on it.

Engine and trainer compute the same probabilities with different kernels and number formats, and the engine's weights
may be older. So the tokens come from `rollout`, the gradient assumes `old` (the trainer's log-probs of the same tokens
before the step), and ratio = old / rollout says how far apart the two are.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from miles_core.algorithms.masking import bounded_exp, masked, sequence_mean, sequence_sum
from miles_core.config.algorithm import OffPolicyConfig

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


class Correction(NamedTuple):
    """Per-token result, each [N]. A rejected token has weight 0 and keeps its place in every denominator."""

    weights: Tensor  # multiplies the policy loss
    ratio: Tensor  # importance ratio before any bound
    clipped: Tensor  # bool: a bound changed the weight
    rejected: Tensor  # bool, trainable tokens only


def importance_ratio(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, sequence_ids: Tensor, *, level: Level
) -> Tensor:
    """exp(clamp(d, +-20)), d the log-ratio old - rollout of the token; its sum over the sequence (product of ratios);
    or its mean over the sequence (geometric mean of ratios). Without gradient; 1 at masked tokens of level `token`."""
    log_ratio = masked(old_log_probs - rollout_log_probs, mask).detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, mask, sequence_ids)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, mask, sequence_ids)
    return bounded_exp(log_ratio)


def importance_weights(ratio: Tensor, mask: Tensor, *, mode: Mode, lower: float, upper: float) -> Correction:
    """Truncated, clipped or masked importance weights.

    - truncate: min(ratio, upper), TIS (F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
      training", 2025)
    - clip: into [lower, upper]
    - mask: ratio inside [lower, upper], else rejected, IcePop at token level (Ring-1T, arXiv 2510.18855)
    """
    inside = (ratio >= lower) & (ratio <= upper)
    if mode == "truncate":
        weights = ratio.clamp(max=upper)
    elif mode == "clip":
        weights = ratio.clamp(lower, upper)
    else:
        weights = torch.where(inside, ratio, 0.0)
    rejected = mask & ~inside if mode == "mask" else torch.zeros_like(mask)
    return Correction(masked(weights, mask), ratio, mask & (weights != ratio), rejected)


def reject(correction: Correction, rejected: Tensor, mask: Tensor) -> Correction:
    """`correction` without the trainable tokens where `rejected`."""
    rejected = mask & rejected
    return correction._replace(
        weights=torch.where(rejected, 0.0, correction.weights), rejected=correction.rejected | rejected
    )


def vetoed(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, sequence_ids: Tensor, *, threshold: float
) -> Tensor:
    """bool [N]: tokens of a sequence in which any trainable token has old / rollout below `threshold`: the trainer
    thinks it all but impossible, so the rest of the sequence was sampled from a context of no use."""
    impossible = masked(old_log_probs - rollout_log_probs, mask) < math.log(threshold)
    return sequence_sum(impossible.to(old_log_probs.dtype), mask, sequence_ids) > 0


def off_policy_correction(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, sequence_ids: Tensor, *, config: OffPolicyConfig
) -> Correction:
    """The correction that `config` describes; weights of 1 for method `none`.

    Method mis follows J. Liu et al., "When speed kills stability", 2025: weights and rejection may use different
    levels. Bounds and veto act on the whole batch alike; nothing depends on how it is cut.
    """
    both = old_log_probs, rollout_log_probs, mask, sequence_ids
    ratio = importance_ratio(*both, level=config.level)
    if config.method == "none":
        return Correction(torch.ones_like(ratio), ratio, torch.zeros_like(mask), torch.zeros_like(mask))
    mode = config.mode or ("mask" if config.method == "icepop" else "truncate")
    correction = importance_weights(ratio, mask, mode=mode, lower=config.lower, upper=config.upper)
    if config.method == "mis":
        tested = importance_ratio(*both, level=config.rejection_level or config.level)
        lower = config.lower if config.rejection_lower is None else config.rejection_lower
        upper = config.upper if config.rejection_upper is None else config.rejection_upper
        correction = reject(correction, (tested < lower) | (tested > upper), mask)
    if config.veto_threshold is not None:
        correction = reject(correction, vetoed(*both, threshold=config.veto_threshold), mask)
    return correction
