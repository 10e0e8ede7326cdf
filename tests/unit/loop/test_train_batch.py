"""From groups to optimizer steps: which model is asked for what, and what stops a step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from miles_core.algorithms.advantages import NonFiniteInputError
from miles_core.config.run import RunConfig
from miles_core.rollout.teachers import TeacherScores
from miles_core.train_batch import build_train_batches
from miles_core.types import Sample, SampleGroup, SampleStatus, TrainSample

PER_TOKEN = {"policy": -1.0, "reference": -1.5}


class Judges:
    """Trainer and teacher that say the same of every token, and keep a record of being asked."""

    def __init__(self, teacher: float = -0.5) -> None:
        self.asked: list[str] = []
        self._teacher = teacher

    def log_probs(self, batch: Sequence[TrainSample], model: Literal["policy", "reference"]) -> list[np.ndarray]:
        self.asked.append(model)
        return [np.full(s.response_length, PER_TOKEN[model], np.float32) for s in batch]

    def values(self, batch: Sequence[TrainSample]) -> list[np.ndarray]:
        self.asked.append("critic")
        return [np.linspace(0.25, 0.5, s.response_length, dtype=np.float32) for s in batch]

    def score(self, batch: Sequence[TrainSample]) -> TeacherScores:
        self.asked.append("teacher")
        return TeacherScores([np.full(s.response_length, self._teacher, np.float32) for s in batch])


def config(algorithm: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    if (algorithm or {}).get("distill_kl_coef"):
        sections["distillation"] = {"teachers": ["teacher"]}
    return RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"task": {}},
            "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "sampling": {"max_new_tokens": 4}},
            "algorithm": algorithm or {},
            "trainer": {"micro_batch_size": 1},
            **sections,
        }
    )


def rollout(rewards: Sequence[float | None] = (1, 0, 0, 1), length: int = 3) -> list[SampleGroup]:
    samples = [
        Sample(
            group_index=i // 2,
            index=10 + i,
            prompt_index=i // 2,
            tokens=np.arange(2 + length, dtype=np.int32),
            response_length=length,
            response="",
            status=SampleStatus.FAILED if reward is None else SampleStatus.COMPLETED,
            loss_mask=np.ones(length, dtype=np.uint8),
            rollout_log_probs=np.full(length, -1, dtype=np.float32),
            weight_versions=np.zeros(length, dtype=np.int32),
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]
    return [SampleGroup(tuple(samples[:2])), SampleGroup(tuple(samples[2:]))]


PPO = {"advantage_estimator": "ppo"}
DISTILLED = {"advantage_estimator": "none", "distill_kl_coef": 2.0}


@pytest.mark.parametrize(
    ("algorithm", "sections", "asked"),
    [
        ({}, {}, []),  # one step on policy: the training pass itself has the old log-probs
        ({}, {"trainer": {"micro_batch_size": 1, "global_batch_size": 2}}, ["policy"]),
        ({"kl_loss_coef": 0.1}, {}, ["reference"]),
        (PPO, {}, ["critic"]),
        (PPO | {"kl_coef": 0.1}, {}, ["policy", "reference", "critic"]),
        (DISTILLED, {}, ["policy", "teacher"]),
    ],
)
def test_only_what_an_algorithm_needs_is_computed(
    algorithm: dict[str, Any], sections: dict[str, Any], asked: list[str]
) -> None:
    judges, run = Judges(), config(algorithm, **sections)
    steps, _ = build_train_batches(rollout(), run, judges, judges if run.algorithm.needs_teacher else None)
    assert judges.asked == asked
    assert [len(step) for step in steps] == [run.global_batch_size] * run.steps_per_rollout


def test_distillation_draws_the_student_to_the_teacher() -> None:
    judges = Judges(teacher=-0.5)  # likes every token better than the student, -1
    ((sample, *_),), metrics = build_train_batches(rollout(), config(DISTILLED), judges, judges)
    assert sample.advantages.tolist() == [1.0, 1.0, 1.0]  # -2 * (-1 - -0.5)
    assert metrics["train/opd_reverse_kl"] == -0.5


def test_the_critic_gets_its_values_and_returns() -> None:
    ((first, second, *_),), metrics = build_train_batches(rollout(), config(PPO), Judges())
    # gamma = lambda = 1: the return of each token is the reward, the advantage what of it was not expected
    assert first.old_values is not None and first.returns is not None and second.returns is not None
    assert first.returns.tolist() == [1, 1, 1] and second.returns.tolist() == [0, 0, 0]
    np.testing.assert_allclose(first.advantages, 1 - first.old_values)
    assert (metrics["rollout/values"], metrics["rollout/returns"]) == (pytest.approx(0.375), 0.5)


def test_an_overlong_response_is_punished() -> None:
    algorithm = {"advantage_estimator": "dr_grpo", "overlong_buffer": 2}
    groups = [rollout()[0], SampleGroup((rollout()[1].samples[0], rollout(length=4)[1].samples[0]))]
    (step,), _ = build_train_batches(groups, config(algorithm), Judges())
    # Both rewards are 0; 3 of 4 tokens with a buffer of 2 cost 0.5, 4 of 4 cost 1.
    assert [s.advantages[0] for s in step[2:]] == [0.25, -0.25]


def test_a_sample_whose_scorer_failed_weighs_nothing() -> None:
    (step,), metrics = build_train_batches(rollout([1, None, 0, 1]), config(), Judges())
    assert step[1].loss_mask.sum() == step[1].loss_weights.sum() == 0
    assert metrics["rollout/trainable_tokens"] == 9


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("where", "message"),
    [("reward", "sample 12: reward is"), ("rollout_log_probs", r"sample 12: rollout_log_probs is .* token 0")],
)
def test_what_is_not_finite_stops_the_step_and_names_the_sample(bad: float, where: str, message: str) -> None:
    groups = rollout()
    value = bad if where == "reward" else np.full(3, bad, dtype=np.float32)
    groups[1] = SampleGroup((replace(groups[1].samples[0], **{where: value}), groups[1].samples[1]))
    with pytest.raises(NonFiniteInputError, match=message):
        build_train_batches(groups, config(), Judges())


@pytest.mark.parametrize(
    ("model", "algorithm", "field"),
    [
        ("policy", {"kl_coef": 0.1, **PPO}, "old_log_probs"),
        ("reference", {"kl_loss_coef": 0.1}, "ref_log_probs"),
    ],
)
def test_a_model_that_gives_nan_stops_the_step(
    model: str, algorithm: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PER_TOKEN, model, np.nan)
    with pytest.raises(NonFiniteInputError, match=f"sample 10: {field} is nan"):
        build_train_batches(rollout(), config(algorithm), Judges())


def test_a_teacher_that_gives_nan_stops_the_step() -> None:
    judges = Judges(teacher=np.nan)
    with pytest.raises(NonFiniteInputError, match="sample 10: teacher_log_probs is nan"):
        build_train_batches(rollout(), config(DISTILLED), judges, judges)


@pytest.mark.parametrize("name", ["loss_mask", "advantages", "returns", "teacher_top_k_ids"])
def test_a_field_of_the_wrong_length_is_refused(name: str) -> None:
    (step,), _ = build_train_batches(rollout(), config(), Judges())
    with pytest.raises(ValueError, match=f"sample 10: {name} has 2 entries, the response 3 tokens"):
        replace(step[0], **{name: np.zeros((2, 1))})
