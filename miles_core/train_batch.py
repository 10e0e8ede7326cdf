"""From scored groups to what the trainer sees: advantages and each token's share in the loss.

Both are worked out here once, over the whole rollout, so no split over ranks or micro-batches can change them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from miles_core.algorithms.advantages import SampleView, compute_advantages, compute_value_targets
from miles_core.algorithms.aggregation import loss_weights
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import Metrics
from miles_core.rollout.teachers import Teacher
from miles_core.trainer.trainer import Trainer
from miles_core.types import Sample, SampleGroup, SampleStatus, TrainSample

PerSample = Sequence[np.ndarray]


def build_train_batches(
    groups: Sequence[SampleGroup], config: RunConfig, trainer: Trainer, teacher: Teacher | None = None
) -> tuple[list[list[TrainSample]], Metrics]:
    """The optimizer steps of one rollout, in order, and metrics of the advantages.

    Raises:
        NonFiniteInputError: a reward, log-prob or value is NaN or infinite; names the sample.
    """
    samples = [s for group in groups for s in group.samples]
    batch = _judged([_without_advantages(s, config) for s in samples], config, trainer, teacher)
    algorithm, max_length = config.algorithm, config.rollout.sampling.max_new_tokens
    views = _views(samples, batch, config.rollout.n_samples_per_prompt)
    advantages = compute_advantages(algorithm, views, max_response_length=max_length)
    batch = _with(batch, advantages=advantages)
    if algorithm.needs_critic:
        batch = _with(batch, returns=compute_value_targets(algorithm, views, max_response_length=max_length))
    steps = []
    for start in range(0, len(batch), config.global_batch_size):
        part = batch[start : start + config.global_batch_size]
        weights = loss_weights([b.loss_mask for b in part], algorithm.loss_aggregation, max_length)
        steps.append(_with(part, loss_weights=weights))
    return steps, _metrics(batch)


def _judged(
    batch: list[TrainSample], config: RunConfig, trainer: Trainer, teacher: Teacher | None
) -> list[TrainSample]:
    """The batch with what the other models say of it, and the policy's own log-probs where these can not be had from
    the training pass itself: with several optimizer steps a rollout, or when advantages depend on them."""
    algorithm = config.algorithm
    if config.steps_per_rollout > 1 or algorithm.kl_coef or algorithm.distill_kl_coef:
        batch = _with(batch, old_log_probs=trainer.log_probs(batch, "policy"))
    if algorithm.needs_reference:
        batch = _with(batch, ref_log_probs=trainer.log_probs(batch, "reference"))
    if algorithm.needs_critic:
        batch = _with(batch, old_values=trainer.values(batch))
    if teacher is not None:
        scores = teacher.score(batch)
        batch = _with(batch, teacher_log_probs=scores.log_probs)
        if scores.top_k_ids is not None and scores.top_k_log_probs is not None:
            batch = _with(batch, teacher_top_k_ids=scores.top_k_ids, teacher_top_k_log_probs=scores.top_k_log_probs)
    return batch


def _with(batch: Sequence[TrainSample], **per_sample: PerSample) -> list[TrainSample]:
    """The batch with further fields, given as one array a sample."""
    rows = zip(*per_sample.values(), strict=True)
    return [replace(sample, **dict(zip(per_sample, row, strict=True))) for sample, row in zip(batch, rows, strict=True)]


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


def _views(samples: Sequence[Sample], batch: Sequence[TrainSample], group_size: int) -> list[list[SampleView]]:
    views = [
        SampleView(
            index=s.index,
            reward=s.reward,
            loss_mask=b.loss_mask,
            old_log_probs=b.old_log_probs,
            ref_log_probs=b.ref_log_probs,
            teacher_log_probs=b.teacher_log_probs,
            values=b.old_values,
            rollout_log_probs=b.rollout_log_probs,
        )
        for s, b in zip(samples, batch, strict=True)
    ]
    return [views[i : i + group_size] for i in range(0, len(views), group_size)]


def _metrics(batch: Sequence[TrainSample]) -> Metrics:
    """Means over the trainable tokens of the rollout."""
    masks = [b.loss_mask > 0 for b in batch]
    tokens = int(sum(mask.sum() for mask in masks))

    def mean(per_token: PerSample) -> float:
        trained = np.concatenate([values[mask] for values, mask in zip(per_token, masks, strict=True)])
        return float(trained.mean()) if tokens else 0.0

    metrics = {"rollout/advantages": mean([b.advantages for b in batch]), "rollout/trainable_tokens": float(tokens)}
    values, returns = _field(batch, "old_values"), _field(batch, "returns")
    if values and returns:
        metrics |= {"rollout/values": mean(values), "rollout/returns": mean(returns)}
    student, teacher = _field(batch, "old_log_probs"), _field(batch, "teacher_log_probs")
    if student and teacher:
        metrics["train/opd_reverse_kl"] = mean([s - t for s, t in zip(student, teacher, strict=True)])
    return metrics


def _field(batch: Sequence[TrainSample], name: str) -> list[np.ndarray]:
    """The field of all samples, or nothing where it was not worked out."""
    return [value for sample in batch if (value := getattr(sample, name)) is not None]
