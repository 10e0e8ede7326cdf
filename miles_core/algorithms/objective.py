"""From log-probs and advantages of a micro-batch to its share of the loss, as `AlgorithmConfig` says."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.algorithms.cispo import cispo
from miles_core.algorithms.distillation import top_k_reverse_kl
from miles_core.algorithms.gspo import gspo
from miles_core.algorithms.kl import kl_divergence, unbiased_kl
from miles_core.algorithms.masking import masked, weighted_sum
from miles_core.algorithms.mismatch import effective_sample_ratio, logprob_abs_diff, mismatch_kl
from miles_core.algorithms.mtp import finalize_mtp_metrics, without_mtp
from miles_core.algorithms.off_policy import off_policy_correction
from miles_core.algorithms.opsm import off_policy_sequence_mask
from miles_core.algorithms.policy_loss import ClippedLoss, ppo_clip
from miles_core.algorithms.sft import sft_loss
from miles_core.config.algorithm import AlgorithmConfig

LOSS_TERMS = ("loss", "pg_loss", "entropy_loss", "kl_loss", "distill_loss")
COUNTS = ("trainable_tokens", "rejected_tokens")


@dataclass(frozen=True)
class ObjectiveInputs:
    """Response tokens of whole samples, packed: N tokens of n samples, prompts left out. float32 unless stated.

    Masked entries of any field may hold anything.
    """

    log_probs: Tensor  # [N], with gradient
    entropy: Tensor | None  # [N], with gradient; needed if entropy_coef > 0
    old_log_probs: Tensor  # [N], the trainer's before the rollout's first step
    rollout_log_probs: Tensor  # [N], the engine's
    ref_log_probs: Tensor | None  # [N]; needed if kl_loss_coef > 0
    advantages: Tensor  # [N]
    loss_mask: Tensor  # bool [N]
    loss_weights: Tensor  # [N], from aggregation.loss_weights
    sequence_ids: Tensor  # int64 [N], 0..n-1
    top_k_log_probs: Tensor | None = None  # [N, k], with gradient; needed if distill_top_k_coef > 0
    teacher_top_k_log_probs: Tensor | None = None  # [N, k]; needed if distill_top_k_coef > 0


def policy_objective(inputs: ObjectiveInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of these tokens in the loss of the global batch, and metrics.

    loss = pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss + distill_top_k_coef * distill_loss, each term
    a sum over tokens with `loss_weights`. Nothing divides further: add up losses (and gradients) of all micro-batches
    and ranks. The metrics, detached scalars, add up likewise; then `finalize_metrics` makes the values to report.

    Raises:
        ValueError: the configuration asks for an input that is None.
    """
    x, mask = inputs, inputs.loss_mask
    means: dict[str, Tensor] = {}  # per token; reported as weighted means
    counts = {"trainable_tokens": mask.float()}  # per token; reported as sums
    terms: dict[str, tuple[float, Tensor]] = {}  # coefficient in the loss, values per token
    if config.policy_loss == "sft":
        terms["pg_loss"] = 1.0, sft_loss(x.log_probs, mask)
    else:
        terms["pg_loss"] = 1.0, _policy_gradient(x, config, means, counts)
    if x.entropy is not None or config.entropy_coef:
        terms["entropy_loss"] = -config.entropy_coef, _needed(x.entropy, "entropy", "entropy_coef")
    if x.ref_log_probs is not None or config.kl_loss_coef:
        ref_log_probs = _needed(x.ref_log_probs, "ref_log_probs", "kl_loss_coef")
        kl = kl_divergence(x.log_probs, ref_log_probs, mask, kl_type=config.kl_type)
        if config.kl_unbiased:
            kl = unbiased_kl(kl, x.log_probs, x.old_log_probs, mask)
        terms["kl_loss"] = config.kl_loss_coef, kl
    if config.distill_top_k_coef:
        student = _needed(x.top_k_log_probs, "top_k_log_probs", "distill_top_k_coef")
        teacher = _needed(x.teacher_top_k_log_probs, "teacher_top_k_log_probs", "distill_top_k_coef")
        terms["distill_loss"] = config.distill_top_k_coef, top_k_reverse_kl(student, teacher, mask)

    sums = {name: weighted_sum(values, x.loss_weights, mask) for name, (_, values) in terms.items()}
    loss = torch.stack([coef * sums[name] for name, (coef, _) in terms.items() if coef]).sum()
    metrics = {"loss": loss} | sums
    metrics |= {name: weighted_sum(values, x.loss_weights, mask) for name, values in means.items()}
    metrics |= {name: masked(values, mask).sum() for name, values in counts.items()}
    metrics["sum:loss_weights"] = masked(x.loss_weights, mask).sum()
    return loss, {name: value.detach() for name, value in metrics.items()}


def finalize_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Values to report, from the metrics of `policy_objective` (and `mtp_objective`) added up over the global batch.

    Loss terms and counts stay as they are. Diagnostics become weighted means: divided by the sum of the weights, which
    is 1 but for samples without trainable tokens and for loss_aggregation=constant. `sum:` pieces make `ess_ratio`.
    """
    drafts, sums = finalize_mtp_metrics(sums), without_mtp(sums)
    total = sums["sum:loss_weights"]
    final = {
        name: value if name in LOSS_TERMS + COUNTS else value / total
        for name, value in sums.items()
        if not name.startswith("sum:")
    }
    if "sum:ratio" in sums:
        final["ess_ratio"] = effective_sample_ratio(
            sums["sum:ratio"], sums["sum:squared_ratio"], sums["trainable_tokens"]
        )
    return final | drafts


def _policy_gradient(
    x: ObjectiveInputs, config: AlgorithmConfig, means: dict[str, Tensor], counts: dict[str, Tensor]
) -> Tensor:
    """Policy loss of each token, [N], corrected; adds its metrics to `means` and `counts`."""
    mask = x.loss_mask
    loss, clipped = _clipped_loss(x, config)
    correction = off_policy_correction(
        x.old_log_probs, x.rollout_log_probs, mask, x.sequence_ids, config=config.off_policy
    )
    loss = masked(loss, ~correction.rejected) * correction.weights
    if config.opsm_delta is not None:
        dropped = off_policy_sequence_mask(
            x.log_probs, x.old_log_probs, x.advantages, mask, x.sequence_ids, delta=config.opsm_delta
        )
        loss = masked(loss, ~dropped)
        means["opsm_clipfrac"] = dropped.float()
    means["pg_clipfrac"] = clipped.float()
    means["ppo_kl"] = x.old_log_probs - x.log_probs
    means["train_rollout_logprob_abs_diff"] = logprob_abs_diff(x.old_log_probs, x.rollout_log_probs, mask)
    means["train_rollout_kl"] = mismatch_kl(x.old_log_probs, x.rollout_log_probs, mask)
    if config.off_policy.method != "none":
        means["tis"], means["tis_clipfrac"] = correction.ratio, correction.clipped.float()
        counts["rejected_tokens"] = correction.rejected.float()
    counts["sum:ratio"], counts["sum:squared_ratio"] = correction.ratio, correction.ratio.square()
    return loss


def _clipped_loss(x: ObjectiveInputs, config: AlgorithmConfig) -> ClippedLoss:
    low = config.eps_clip
    high = low if config.eps_clip_high is None else config.eps_clip_high
    common = x.log_probs, x.old_log_probs, x.advantages, x.loss_mask
    if config.policy_loss == "gspo":
        return gspo(*common, x.sequence_ids, clip_low=low, clip_high=high, dual_clip=config.eps_clip_c)
    if config.policy_loss == "cispo":
        return cispo(*common, clip_low=low, clip_high=high)
    return ppo_clip(*common, clip_low=low, clip_high=high, dual_clip=config.eps_clip_c)


def _needed(value: Tensor | None, name: str, option: str) -> Tensor:
    if value is None:
        raise ValueError(f"ObjectiveInputs.{name} is None while algorithm.{option} > 0: compute it, or set that to 0")
    return value
