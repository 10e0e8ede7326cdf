"""Overlong shaping and the filter of dynamic sampling."""

import numpy as np
import pytest

from miles_core.algorithms.dapo import has_reward_spread, overlong_penalty


def test_overlong_penalty_falls_linearly_over_the_buffer() -> None:
    found = overlong_penalty(np.array([0, 6, 7, 8, 10, 12]), max_length=10, buffer=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1, 1, 1], False), ([0.1] * 7, False), ([1, 0], True), ([1], False), ([], False)]
)
def test_only_groups_with_spread_are_worth_training_on(rewards: list[float], expected: bool) -> None:
    assert has_reward_spread(rewards) is expected
