"""From rewards to advantages: the entry point."""

from collections.abc import Sequence

import numpy as np

from miles_core.algorithms.advantages.distillation import distillation_advantage
from miles_core.algorithms.advantages.estimators import ESTIMATORS
from miles_core.algorithms.advantages.sample_view import SampleView
from miles_core.algorithms.advantages.whitening import whiten
from miles_core.algorithms.dapo import overlong_penalty
from miles_core.config.algorithm import AlgorithmConfig

Groups = Sequence[Sequence[SampleView]]


def compute_advantages(
    config: AlgorithmConfig, groups: Groups, *, max_response_length: int | None = None
) -> list[np.ndarray]:
    """Advantage of each response token, float32 [R], for every sample of the rollout in order; 0 at masked tokens.

    In this order: overlong penalty on the reward, estimator, distillation term, whitening. Computed in float64, which
    costs nothing here and keeps centring and whitening exact to float32. `max_response_length` is
    rollout.sampling.max_new_tokens, needed for `overlong_buffer`.

    Raises:
        NonFiniteInputError: a NaN or infinite reward, log-prob or value, with the sample's index.
        ValueError: a field that the algorithm needs is None.
    """
    samples = [sample for group in groups for sample in group]
    advantages = _estimate(config, groups, max_response_length)
    if config.distill_kl_coef:
        advantages = [
            a
            + distillation_advantage(
                s.on_trainable("old_log_probs"), s.on_trainable("teacher_log_probs"), coef=config.distill_kl_coef
            )
            for a, s in zip(advantages, samples, strict=True)
        ]
    if config.normalize_advantages:
        advantages = whiten(advantages)
    return [_spread(a, s) for a, s in zip(advantages, samples, strict=True)]


def compute_value_targets(
    config: AlgorithmConfig, groups: Groups, *, max_response_length: int | None = None
) -> list[np.ndarray]:
    """What the critic learns, laid out as by `compute_advantages`: the value plus the advantage before distillation and
    whitening."""
    samples = [sample for group in groups for sample in group]
    advantages = _estimate(config, groups, max_response_length)
    return [_spread(a + s.on_trainable("values"), s) for a, s in zip(advantages, samples, strict=True)]


def _estimate(config: AlgorithmConfig, groups: Groups, max_response_length: int | None) -> list[np.ndarray]:
    """Advantages of the trainable tokens of every sample; zeros for an unscored one."""
    estimator = ESTIMATORS[config.advantage_estimator]
    advantages: list[np.ndarray] = []
    for group in groups:
        for sample in group:
            sample.check_finite()
            if sample.reward is None and sample.trainable.any() and config.advantage_estimator != "none":
                raise ValueError(
                    f"sample {sample.index}: {sample.trainable.sum()} trainable tokens but no reward: mask or score it"
                )
        scored = [sample for sample in group if sample.reward is not None]
        estimates = iter(estimator(config, scored, _shaped_rewards(config, scored, max_response_length)))
        advantages += [
            np.zeros(sample.trainable.sum()) if sample.reward is None else next(estimates) for sample in group
        ]
    return advantages


def _shaped_rewards(config: AlgorithmConfig, group: Sequence[SampleView], max_length: int | None) -> np.ndarray:
    rewards = np.array([sample.reward for sample in group], np.float64)
    if config.overlong_buffer is None:
        return rewards
    if max_length is None:
        raise ValueError(f"algorithm.overlong_buffer={config.overlong_buffer} needs max_response_length, found None")
    lengths = np.array([len(sample.loss_mask) for sample in group])
    return rewards + overlong_penalty(lengths, max_length=max_length, buffer=config.overlong_buffer)


def _spread(values: np.ndarray, sample: SampleView) -> np.ndarray:
    """Values of the trainable tokens in their places, float32 [R], 0 elsewhere."""
    out = np.zeros(len(sample.loss_mask), np.float32)
    out[sample.trainable] = values
    return out
