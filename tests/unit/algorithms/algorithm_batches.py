"""Random micro-batches with odd masks, and how to cut them."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from miles_core.algorithms.aggregation import loss_weights
from miles_core.algorithms.objective import ObjectiveInputs, finalize_metrics, policy_objective
from miles_core.config.algorithm import AlgorithmConfig, OffPolicyConfig

# Sample 1 has no trainable token, sample 2 is one token long, the others have holes.
MASKS = ([1, 0, 0, 1, 1], [0, 0, 0], [1], [0, 1, 1, 0])

CONFIGS = {
    "grpo": AlgorithmConfig(),
    "grpo_kl_k3": AlgorithmConfig(kl_loss_coef=0.3, kl_type="k3", kl_unbiased=True, entropy_coef=0.1),
    "dapo": AlgorithmConfig(loss_aggregation="token_mean", eps_clip_high=0.28),
    "dr_grpo": AlgorithmConfig(advantage_estimator="dr_grpo", loss_aggregation="constant"),
    "rloo": AlgorithmConfig(advantage_estimator="rloo", kl_loss_coef=0.1, kl_type="k2"),
    "gspo": AlgorithmConfig(advantage_estimator="gspo", policy_loss="gspo", eps_clip=3e-2),
    "cispo": AlgorithmConfig(policy_loss="cispo", eps_clip=1.0, eps_clip_high=0.5),
    "reinforce_plus_plus": AlgorithmConfig(advantage_estimator="reinforce_plus_plus", normalize_advantages=True),
    "reinforce_plus_plus_baseline": AlgorithmConfig(
        advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True, kl_coef=0.1, kl_type="k1"
    ),
    "ppo": AlgorithmConfig(advantage_estimator="ppo", eps_clip_c=3.0, gae_lambda=0.9),
    "tis": AlgorithmConfig(off_policy=OffPolicyConfig(method="tis", upper=1.2)),
    "tis_sequence": AlgorithmConfig(off_policy=OffPolicyConfig(method="tis", level="sequence", mode="clip")),
    "mis": AlgorithmConfig(
        off_policy=OffPolicyConfig(method="mis", rejection_level="geometric", rejection_upper=1.5, veto_threshold=0.4)
    ),
    "icepop": AlgorithmConfig(off_policy=OffPolicyConfig(method="icepop", lower=0.8, upper=1.2)),
    "opsm": AlgorithmConfig(opsm_delta=1e-2),
    "distillation": AlgorithmConfig(advantage_estimator="none", distill_kl_coef=1.0),
    "distillation_top_k": AlgorithmConfig(advantage_estimator="none", distill_top_k_coef=0.5),
    "sft": AlgorithmConfig(advantage_estimator="none", policy_loss="sft"),
}


def packed_batch(
    aggregation: str = "sample_mean", *, seed: int = 0, masks: Sequence[Sequence[int]] = MASKS, scale: float = 0.3
) -> ObjectiveInputs:
    """Log-probs around -1 that differ by `scale` from field to field; one advantage a sample."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(map(len, masks))

    def noise(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    base = -1 + noise(n)
    lengths = torch.tensor([len(mask) for mask in masks])
    advantages = torch.randn(len(masks), generator=generator).repeat_interleave(lengths)
    weights = loss_weights([np.array(mask) for mask in masks], aggregation, 8)
    return ObjectiveInputs(
        log_probs=base.clone().requires_grad_(),
        entropy=(1 + noise(n)).requires_grad_(),
        old_log_probs=base + noise(n),
        rollout_log_probs=base + noise(n),
        ref_log_probs=base + noise(n),
        advantages=advantages,
        loss_mask=torch.tensor([entry for mask in masks for entry in mask], dtype=torch.bool),
        loss_weights=torch.from_numpy(np.concatenate(weights)),
        sequence_ids=torch.arange(len(masks)).repeat_interleave(lengths),
        top_k_log_probs=torch.log_softmax(noise(n, 5), -1)[:, :3].requires_grad_(),
        teacher_top_k_log_probs=torch.log_softmax(noise(n, 5), -1)[:, :3],
    )


def take(batch: ObjectiveInputs, samples: Sequence[int]) -> ObjectiveInputs:
    """A micro-batch of some samples in the order given, numbered from 0; gradients reach the whole batch."""
    rows = torch.cat([(batch.sequence_ids == sample).nonzero().squeeze(-1) for sample in samples])
    cut = {f.name: getattr(batch, f.name)[rows] for f in fields(batch) if getattr(batch, f.name) is not None}
    lengths = torch.tensor([int((batch.sequence_ids == sample).sum()) for sample in samples])
    return replace(batch, **(cut | {"sequence_ids": torch.arange(len(samples)).repeat_interleave(lengths)}))


def evaluate(
    batch: ObjectiveInputs, config: AlgorithmConfig, parts: Sequence[Sequence[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient of the log-probs and reported metrics, added up over the micro-batches `parts`."""
    batch.log_probs.grad = None
    total, sums = 0.0, {}
    for part in parts:
        loss, metrics = policy_objective(take(batch, part), config)
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
    return total, batch.log_probs.grad.clone(), finalize_metrics(sums)
