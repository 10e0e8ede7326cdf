from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_core.config.run import RunConfig
from miles_core.rewards import RewardError, Scorer, build_scorer
from miles_core.types import Prompt, Sample, SampleStatus, Score

PROMPTS = [Prompt(5, "21=", np.zeros(3, np.int32), "12"), Prompt(9, "43=", np.zeros(3, np.int32), "34")]


def sample(index: int, response: str, status: SampleStatus = SampleStatus.COMPLETED) -> Sample:
    length = len(response)
    return Sample(
        group_index=index // 4,
        index=index,
        prompt_index=PROMPTS[index // 4].index,
        tokens=np.zeros(3 + length, np.int32),
        response_length=length,
        response=response,
        status=status,
        loss_mask=np.ones(length, np.uint8),
        rollout_log_probs=np.zeros(length, np.float32),
        weight_versions=np.zeros(length, np.int32),
    )


def groups(*responses: str) -> list[list[Sample]]:
    samples = [sample(index, response) for index, response in enumerate(responses)]
    return [part for part in (samples[:4], samples[4:]) if part]


def rewards(scored: Any) -> list[float | None]:
    return [s.reward for group in scored for s in group.samples]


def failing(*responses: str) -> Callable[[Prompt, str], Score]:
    def reward(prompt: Prompt, response: str) -> Score:
        if response in responses:
            raise ConnectionError(f"backend down for {response}")
        return Score(1.0)

    return reward


def test_each_sample_is_scored_with_its_own_prompt() -> None:
    config = RunConfig.model_validate({"model": {"random": {}}, "data": {"task": {}}})
    scored, metrics = build_scorer(config, PROMPTS)(groups("12", "34", "21", "", "34", "12", " 34 ", "\n"))
    perfect = rewards(scored)[0]
    assert perfect == 1.0
    assert [r == perfect for r in rewards(scored)] == [True, False, False, False, True, False, True, False]
    assert [group.group_index for group in scored] == [0, 1]
    assert metrics == {"rollout/no_answer": 2.0, "rollout/reward_failures": 0.0}


def test_a_right_answer_counts_whatever_follows_and_a_missing_one_is_counted_apart() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"prompts": "x", "eval_prompts": "y"},
            "reward": {"type": "boxed_math"},
        }
    )
    prompts = [Prompt(5, "6*7=", np.zeros(3, np.int32), "42"), Prompt(9, "137=", np.zeros(3, np.int32), "137")]
    responses = ["\\boxed{42}", "\\boxed{42}" + "." * 400, "", "no idea", "\\boxed{137}"]
    scored, metrics = build_scorer(config, prompts)(groups(*responses))
    assert rewards(scored) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert metrics["rollout/no_answer"] == 2.0


def test_a_failure_ends_the_rollout_with_sample_and_message() -> None:
    with pytest.raises(RewardError, match=r"sample 1: .* ConnectionError: backend down for b \(1 failures .* is 0\)"):
        Scorer(failing("b", "c"), PROMPTS, failure_tolerance=0)(groups("a", "b", "c"))


def test_tolerated_failures_are_counted_and_their_samples_marked() -> None:
    scored, metrics = Scorer(failing("b"), PROMPTS, failure_tolerance=1)(groups("a", "b", "c", "d", "e", "f", "g", "h"))
    statuses = [s.status for group in scored for s in group.samples]
    assert rewards(scored) == [1.0, None, *[1.0] * 6]
    assert statuses == [SampleStatus.COMPLETED, SampleStatus.FAILED, *[SampleStatus.COMPLETED] * 6]
    assert metrics == {"rollout/no_answer": 0.0, "rollout/reward_failures": 1.0}


def test_one_failure_more_than_tolerated_raises_the_first() -> None:
    with pytest.raises(RewardError, match=r"sample 1: .*backend down for b \(3 failures .* is 2\)") as error:
        Scorer(failing("b", "c", "d"), PROMPTS, failure_tolerance=2)(groups("a", "b", "c", "d"))
    assert isinstance(error.value.__cause__, ConnectionError)


def test_samples_that_failed_before_are_not_scored() -> None:
    failed = sample(0, "b", SampleStatus.FAILED)
    scored, metrics = Scorer(failing("b"), PROMPTS, failure_tolerance=0)([[failed, sample(1, "a")]])
    assert rewards(scored) == [None, 1.0]
    assert metrics["rollout/reward_failures"] == 0.0


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), "the reward is nan, a finite number is required"),
        (float("-inf"), "the reward is -inf, a finite number is required"),
        (np.float32("nan"), "the reward is nan, a finite number is required"),
        (None, "the reward is a NoneType, a number is required"),
        ("1.0", "the reward is a str, a number is required"),
        ({"score": 1.0}, "the reward is a dict, a number is required"),
    ],
)
def test_what_is_no_finite_number_is_never_tolerated(value: Any, fault: str) -> None:
    with pytest.raises(RewardError, match="sample 0: " + fault):
        Scorer(lambda prompt, response: Score(value), PROMPTS, failure_tolerance=8)(groups("a"))


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1)])
def test_numbers_of_other_types_become_floats(value: Any) -> None:
    scored, _ = Scorer(lambda prompt, response: Score(value), PROMPTS, failure_tolerance=0)(groups("a"))
    assert type(rewards(scored)[0]) is float
    assert rewards(scored) == [1.0]
