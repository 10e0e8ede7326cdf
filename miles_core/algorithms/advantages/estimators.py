"""The estimators by name: for the responses to one prompt, the advantages of their trainable tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from miles_core.algorithms.advantages.dr_grpo import dr_grpo
from miles_core.algorithms.advantages.gae import gae
from miles_core.algorithms.advantages.grpo import grpo
from miles_core.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
)
from miles_core.algorithms.advantages.rloo import rloo
from miles_core.algorithms.advantages.sample_view import SampleView
from miles_core.algorithms.kl import kl_divergence
from miles_core.config.algorithm import AlgorithmConfig

Estimator = Callable[[AlgorithmConfig, Sequence[SampleView], np.ndarray], list[np.ndarray]]
"""(config, group of n, rewards float64 [n]) -> float64 [T_i] for each sample's T_i trainable tokens. `rewards` are the
samples' own after shaping; the group holds its scored samples."""


def _outcome(advantage: Callable[[np.ndarray], np.ndarray]) -> Estimator:
    """One advantage a response, the same for each of its tokens."""

    def estimator(_: AlgorithmConfig, group: Sequence[SampleView], rewards: np.ndarray) -> list[np.ndarray]:
        return [np.full(s.trainable.sum(), a) for s, a in zip(group, advantage(rewards), strict=True)]

    return estimator


def _reinforce_plus_plus(config: AlgorithmConfig, group: Sequence[SampleView], rewards: np.ndarray) -> list[np.ndarray]:
    return [
        reinforce_plus_plus(reward, _kl(config, sample), kl_coef=config.kl_coef, gamma=config.gamma)
        for sample, reward in zip(group, rewards, strict=True)
    ]


def _reinforce_plus_plus_baseline(
    config: AlgorithmConfig, group: Sequence[SampleView], rewards: np.ndarray
) -> list[np.ndarray]:
    return reinforce_plus_plus_baseline(rewards, [_kl(config, sample) for sample in group], kl_coef=config.kl_coef)


def _ppo(config: AlgorithmConfig, group: Sequence[SampleView], rewards: np.ndarray) -> list[np.ndarray]:
    return [
        gae(
            token_rewards(reward, _kl(config, sample), kl_coef=config.kl_coef),
            sample.on_trainable("values"),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        for sample, reward in zip(group, rewards, strict=True)
    ]


def _kl(config: AlgorithmConfig, sample: SampleView) -> np.ndarray:
    """KL to the reference at the trainable tokens; zeros, without any reference, if no coefficient uses it."""
    if not config.kl_coef:
        return np.zeros(sample.trainable.sum())
    policy, ref = (torch.from_numpy(sample.on_trainable(name)) for name in ("old_log_probs", "ref_log_probs"))
    return kl_divergence(policy, ref, torch.ones_like(policy, dtype=torch.bool), kl_type=config.kl_type).numpy()


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _outcome(grpo),
    "gspo": _outcome(grpo),
    "dr_grpo": _outcome(dr_grpo),
    "rloo": _outcome(rloo),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "ppo": _ppo,
    "none": _outcome(np.zeros_like),
}
