"""Reward functions by the names that `reward.type` takes."""

from collections.abc import Callable
from typing import Protocol

from miles_core.config.run import RunConfig
from miles_core.data.rows import DataError
from miles_core.data.tasks import build_task
from miles_core.rewards.exact_match import exact_match
from miles_core.rewards.function import FunctionReward
from miles_core.rewards.symbolic import SymbolicReward
from miles_core.types import Prompt, Score


class RewardFn(Protocol):
    """Scores one response. What it raises counts as a failure of that sample (`reward.failure_tolerance`)."""

    def __call__(self, prompt: Prompt, response: str, /) -> Score: ...


def _task(config: RunConfig) -> RewardFn:
    if config.data.task is None:
        raise DataError(["reward.type=task needs data.task"])
    return build_task(config.data.task).score


def _function(config: RunConfig) -> RewardFn:
    return FunctionReward(config.reward.function or "")


REWARDS: dict[str, Callable[[RunConfig], RewardFn]] = {
    "task": _task,
    "exact_match": lambda config: exact_match,
    "math": lambda config: SymbolicReward("anywhere"),
    "boxed_math": lambda config: SymbolicReward("boxed"),
    "function": _function,
}


def build_reward(config: RunConfig) -> RewardFn:
    """The reward function of a run."""
    return REWARDS[config.reward.type](config)
