"""From scored groups to what the trainer sees: advantages and each token's share in the loss.

Both are worked out here once, over the whole rollout, so no split over ranks or micro-batches can change them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from miles_core.algorithms.advantages import SampleView, compute_advantages
from miles_core.algorithms.aggregation import loss_weights
from miles_core.config.run import RunConfig
from miles_core.trainer.trainer import Trainer
from miles_core.types import Sample, SampleGroup, SampleStatus, TrainSample


def build_train_batches(
    groups: Sequence[SampleGroup], config: RunConfig, trainer: Trainer
) -> tuple[list[list[TrainSample]], dict[str, float]]:
    """The optimizer steps of one rollout, in order, and metrics of the advantages.

    Log-probs of the old policy are taken first when they cannot be had from the training pass itself: with several
    optimizer steps a rollout, or when the KL is part of the reward.
    """
    samples = [s for group in groups for s in group.samples]
    batch = [_without_advantages(s, config) for s in samples]
    algorithm = config.algorithm
    if config.steps_per_rollout > 1 or algorithm.kl_coef > 0:
        batch = [replace(b, old_log_probs=lp) for b, lp in zip(batch, trainer.log_probs(batch, "policy"), strict=True)]
    if algorithm.needs_reference:
        batch = [
            replace(b, ref_log_probs=lp) for b, lp in zip(batch, trainer.log_probs(batch, "reference"), strict=True)
        ]
    views = [
        SampleView(s.index, s.reward, b.loss_mask, b.old_log_probs, b.ref_log_probs)
        for s, b in zip(samples, batch, strict=True)
    ]
    size = config.rollout.n_samples_per_prompt
    advantages = compute_advantages(algorithm, [views[i : i + size] for i in range(0, len(views), size)])
    batch = [replace(b, advantages=a) for b, a in zip(batch, advantages, strict=True)]
    steps = []
    for start in range(0, len(batch), config.global_batch_size):
        part = batch[start : start + config.global_batch_size]
        weights = loss_weights(
            [b.loss_mask for b in part], algorithm.loss_aggregation, config.rollout.sampling.max_new_tokens
        )
        steps.append([replace(b, loss_weights=w) for b, w in zip(part, weights, strict=True)])
    trainable = np.concatenate([a[b.loss_mask > 0] for a, b in zip(advantages, batch, strict=True)])
    return steps, {
        "rollout/advantages": float(trainable.mean()) if len(trainable) else 0.0,
        "rollout/trainable_tokens": float(len(trainable)),
    }


def _without_advantages(sample: Sample, config: RunConfig) -> TrainSample:
    # A sample whose scorer failed stays in the batch with an empty mask, so that batch sizes keep their meaning.
    mask = np.zeros_like(sample.loss_mask) if sample.status is SampleStatus.FAILED else sample.loss_mask
    empty = np.zeros(sample.response_length, dtype=np.float32)
    return TrainSample(
        index=sample.index,
        tokens=sample.tokens,
        response_length=sample.response_length,
        loss_mask=mask,
        loss_weights=empty,
        advantages=empty,
        rollout_log_probs=sample.rollout_log_probs,
        routed_experts=sample.routed_experts if config.trainer.routing_replay else None,
    )
