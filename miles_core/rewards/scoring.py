"""Rewards of a whole rollout, with every failure accounted for."""

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

from miles_core.config.run import RunConfig
from miles_core.rewards.reward import RewardFn, build_reward
from miles_core.types import Prompt, Sample, SampleGroup, SampleStatus


class RewardError(RuntimeError):
    """A reward function failed, or gave what is no reward; names the sample."""


class Scorer:
    """Scores groups of samples whose prompts it was given."""

    def __init__(self, reward: RewardFn, prompts: Sequence[Prompt], failure_tolerance: int) -> None:
        self._reward = reward
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self._failure_tolerance = failure_tolerance

    def __call__(self, groups: Sequence[Sequence[Sample]]) -> tuple[list[SampleGroup], dict[str, float]]:
        """Scored groups in the same order, and the counts of samples `rollout/no_answer` and `rollout/reward_failures`.

        A sample whose reward function raises gets the status FAILED and no reward; samples that had failed before keep
        both. `RewardError` when more than `reward.failure_tolerance` raise (with the first one's message), and for any
        reward that is no finite number: that is a fault of the function, not of a sample.
        """
        failures: list[tuple[Sample, Exception]] = []
        no_answer = 0
        scored: list[SampleGroup] = []
        for group in groups:
            samples = []
            for sample in group:
                if sample.status is not SampleStatus.FAILED:
                    prompt = self._prompts[sample.prompt_index]
                    try:
                        score = self._reward(prompt, sample.response)
                    except Exception as error:
                        failures.append((sample, error))
                        self._check_tolerance(failures)
                        sample = replace(sample, status=SampleStatus.FAILED, reward=None)
                    else:
                        sample = replace(sample, reward=_finite(score.value, sample))
                        no_answer += not score.answer_found
                samples.append(sample)
            scored.append(SampleGroup(tuple(samples)))
        return scored, {"rollout/no_answer": float(no_answer), "rollout/reward_failures": float(len(failures))}

    def _check_tolerance(self, failures: Sequence[tuple[Sample, Exception]]) -> None:
        if len(failures) > self._failure_tolerance:
            sample, first = failures[0]
            raise RewardError(
                f"sample {sample.index}: the reward function raised {type(first).__name__}: {first} "
                f"({len(failures)} failures in this rollout, reward.failure_tolerance is {self._failure_tolerance})"
            ) from first


def build_scorer(config: RunConfig, prompts: Sequence[Prompt]) -> Scorer:
    """The scorer of a run for samples of these prompts."""
    return Scorer(build_reward(config), prompts, config.reward.failure_tolerance)


def _finite(value: object, sample: Sample) -> float:
    if not isinstance(value, Real):
        raise RewardError(f"sample {sample.index}: the reward is a {type(value).__name__}, a number is required")
    if not math.isfinite(value):
        raise RewardError(f"sample {sample.index}: the reward is {float(value)}, a finite number is required")
    return float(value)
