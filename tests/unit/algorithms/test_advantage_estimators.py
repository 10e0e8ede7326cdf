"""Advantage estimators against numbers worked out by hand."""

import numpy as np
import pytest

from miles_core.algorithms.advantages.distillation import distillation_advantage
from miles_core.algorithms.advantages.dr_grpo import dr_grpo
from miles_core.algorithms.advantages.gae import gae
from miles_core.algorithms.advantages.grpo import grpo
from miles_core.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from miles_core.algorithms.advantages.rloo import rloo
from miles_core.algorithms.advantages.whitening import whiten


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        (grpo, [1, 0, 0, 1], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),  # std 0.57735 with divisor n - 1
        (grpo, [3, 1], [0.7071063, -0.7071063]),
        (dr_grpo, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        (dr_grpo, [6, 0, 0], [4, -2, -2]),
        (rloo, [1, 0, 0], [1, -0.5, -0.5]),
        (rloo, [4, 1], [3, -3]),
    ],
)
def test_group_baselines(estimator, rewards: list[float], expected: list[float]) -> None:
    assert estimator(np.array(rewards, np.float64)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [1e9 / 3] * 5, [0.7], []], ids=str)
def test_equal_rewards_and_single_samples_give_exactly_zero(estimator, rewards: list[float]) -> None:
    """The mean of three 0.1 is not 0.1 in floating point, so centring alone would leave a difference."""
    assert estimator(np.array(rewards, np.float64)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("reward", "kl", "kl_coef", "gamma", "expected"),
    [
        (1.0, [0.1, 0.3], 0.5, 1.0, [0.80, 0.85]),
        (1.0, [0.0, 0.0, 0.0], 0.5, 0.5, [0.25, 0.5, 1.0]),
        (2.0, [1.0, 1.0], 1.0, 0.5, [-0.5, 1.0]),
        (1.0, [], 0.5, 1.0, []),
    ],
)
def test_reinforce_plus_plus_returns(
    reward: float, kl: list[float], kl_coef: float, gamma: float, expected: list[float]
) -> None:
    found = reinforce_plus_plus(reward, np.array(kl, np.float64), kl_coef=kl_coef, gamma=gamma)
    assert found == pytest.approx(expected)


def test_reinforce_plus_plus_baseline_subtracts_group_mean_and_kl() -> None:
    kls = [np.array([0.2, 0.0]), np.ones(1), np.zeros(0)]
    found = reinforce_plus_plus_baseline(np.array([3.0, 0.0, 0.0]), kls, kl_coef=0.5)
    assert [a.tolist() for a in found] == [pytest.approx([1.9, 2.0]), pytest.approx([-1.5]), []]


@pytest.mark.parametrize(
    ("rewards", "values", "gamma", "gae_lambda", "expected"),
    [
        ([0, 0, 1], [0.5, 0.25, 0.5], 1.0, 0.5, [0.0, 0.5, 0.5]),
        ([0, 0, 1], [0.5, 0.25, 0.5], 1.0, 0.0, [-0.25, 0.25, 0.5]),  # one-step differences
        ([0, 0, 1], [0.5, 0.25, 0.5], 1.0, 1.0, [0.5, 0.75, 0.5]),  # return less value
        ([1, 1], [0.0, 2.0], 0.5, 0.5, [1.75, -1.0]),  # -1; 1 + 0.5 * 2 - 0 + 0.25 * -1
        ([], [], 1.0, 1.0, []),
    ],
)
def test_gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float, expected: list[float]) -> None:
    found = gae(np.array(rewards, np.float64), np.array(values, np.float64), gamma=gamma, gae_lambda=gae_lambda)
    assert found == pytest.approx(expected)


def test_whitening_is_over_all_tokens_of_all_samples() -> None:
    found = whiten([np.array([1.0]), np.array([3.0, 2.0]), np.zeros(0)])
    assert [a.tolist() for a in found] == [pytest.approx([-1]), pytest.approx([1, 0]), []]  # mean 2, variance 1
    tokens = np.concatenate(whiten([np.random.default_rng(0).normal(5, 3, n) for n in (3, 10, 1)]))
    assert tokens.mean() == pytest.approx(0, abs=1e-12)
    assert tokens.std(ddof=1) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("advantages", [[[0.1] * 3, [0.1] * 4], [[2.0]], [[]], []], ids=str)
def test_whitening_of_equal_advantages_is_exactly_zero(advantages: list[list[float]]) -> None:
    assert [a.tolist() for a in whiten([np.array(a) for a in advantages])] == [[0.0] * len(a) for a in advantages]


def test_distillation_advantage_is_positive_where_the_teacher_is_likelier() -> None:
    found = distillation_advantage(np.array([-1.5, -1.0, -0.3]), np.array([-0.5, -2.0, -0.3]), coef=1.0)
    assert found.tolist() == [1.0, -1.0, 0.0]
