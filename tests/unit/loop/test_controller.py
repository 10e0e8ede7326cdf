"""The order of things in a run: pushes, the critic's head start, checkpoints, metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.checkpoint import CheckpointFolder
from miles_core.config.run import RunConfig
from miles_core.controller import Controller
from miles_core.observability.metrics import Metrics
from miles_core.types import Sample, SampleGroup, SampleStatus, TrainSample


class Recorded:
    """Every part of a run at once; `calls` is what happened to them, in order."""

    def __init__(self, group_size: int) -> None:
        self.calls: list[str] = []
        self.rows: list[Metrics] = []
        self._group_size, self._next = group_size, 0

    def collect(self) -> tuple[list[SampleGroup], Metrics]:
        self.calls.append(f"collect {self._next}")
        self._next += 1
        one = np.ones(2, dtype=np.float32)
        samples = [
            Sample(0, i, 0, np.arange(3), 2, "", SampleStatus.COMPLETED, one, -one, one, reward=float(i % 2))
            for i in range(self._group_size)
        ]
        return [SampleGroup(tuple(samples))], {}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def values(self, batch: Sequence[TrainSample]) -> list[np.ndarray]:
        return [np.zeros(s.response_length, np.float32) for s in batch]

    def log_probs(self, batch: Sequence[TrainSample], model: str) -> list[np.ndarray]:
        return [np.full(s.response_length, -1, np.float32) for s in batch]

    def train_step(self, batch: Sequence[TrainSample]) -> Metrics:
        self.calls.append("policy")
        return {"train/loss": float(len(self.calls)), "train/skipped_steps": 1.0}

    def train_critic(self, batch: Sequence[TrainSample]) -> Metrics:
        self.calls.append("critic")
        return {"train/critic-value_loss": 1.0, "train/critic-skipped_steps": 1.0}

    def refresh_reference(self) -> None:
        self.calls.append("refresh")

    def push(self, version: int) -> Metrics:
        self.calls.append(f"push {version}")
        return {"perf/weights_gbytes": 1.0}

    def release_devices(self) -> None:
        self.calls.append("release")

    def save(self, folder: Path) -> None:
        self.calls.append(f"save {folder.name}")

    def load(self, folder: Path) -> None:
        self.calls.append(f"load {folder.name}")

    def write(self, rollout_id: int, metrics: Metrics) -> None:
        self.rows.append(metrics)

    def close(self) -> None:
        """Nothing is held."""


def controller(root: Path, parts: Recorded, *, engines: bool = True, **sections: Any) -> Controller:
    config = RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"task": {}},
            "trainer": {"micro_batch_size": 1, "checkpoint": {"interval": 2}} | sections.pop("trainer", {}),
            **sections,
            "rollout": {"batch_size": 1, "n_samples_per_prompt": 4, "num_rollout": 3} | sections.pop("rollout", {}),
        }
    )
    return Controller(
        config=config,
        collector=parts,
        trainer=parts,  # type: ignore[arg-type]  # a recorder of calls
        weights=parts if engines else None,
        checkpoints=CheckpointFolder(root, keep=2),
        sinks=[parts],
    )


def test_a_run_pushes_before_it_samples_and_saves_after_it_trained(tmp_path: Path) -> None:
    parts = Recorded(4)
    controller(tmp_path, parts, algorithm={"kl_loss_coef": 0.1, "ref_update_interval": 2}).run()
    assert parts.calls == [
        *("push 0", "collect 0", "release", "policy", "push 1"),
        *("collect 1", "release", "policy", "refresh", "push 2", "save iter_0000002"),
        *("collect 2", "release", "policy", "push 3", "save iter_0000003"),
    ]


def test_a_resumed_run_goes_on_where_it_was_saved_and_a_finished_one_does_nothing(tmp_path: Path) -> None:
    controller(tmp_path, Recorded(4), rollout={"num_rollout": 2}).run()
    resumed = Recorded(4)
    folder = controller(tmp_path, resumed).run()
    assert resumed.calls == [
        *("load iter_0000002", "push 2", "collect 2", "release", "policy", "push 3", "save iter_0000003")
    ]
    finished = Recorded(4)
    assert controller(tmp_path, finished).run() == folder
    assert finished.calls == ["load iter_0000003"]


def test_the_critic_has_a_head_start(tmp_path: Path) -> None:
    parts = Recorded(4)
    algorithm = {"advantage_estimator": "ppo", "critic_warmup_rollouts": 1}
    controller(tmp_path, parts, algorithm=algorithm, rollout={"num_rollout": 2}).run()
    trained = [call for call in parts.calls if call in ("critic", "policy")]
    assert trained == ["critic", "critic", "policy"]
    assert "train/loss" not in parts.rows[0] and "train/loss" in parts.rows[1]


def test_without_engines_nothing_is_pushed(tmp_path: Path) -> None:
    parts = Recorded(1)
    algorithm = {"advantage_estimator": "none", "policy_loss": "sft"}
    rollout = {"n_samples_per_prompt": 1, "num_rollout": 1}
    controller(tmp_path, parts, engines=False, algorithm=algorithm, rollout=rollout).run()
    assert parts.calls == ["collect 0", "policy", "save iter_0000001"]


def test_steps_of_a_rollout_are_averaged_and_skipped_ones_counted(tmp_path: Path) -> None:
    parts = Recorded(4)
    algorithm = {"advantage_estimator": "ppo"}
    controller(tmp_path, parts, algorithm=algorithm, rollout={"num_rollout": 1}, trainer={"global_batch_size": 2}).run()
    assert parts.calls[:7] == ["push 0", "collect 0", "release", "critic", "policy", "critic", "policy"]
    (row,) = parts.rows
    assert row["train/loss"] == pytest.approx(6.0)  # of the calls 5 and 7
    assert (row["train/skipped_steps"], row["train/critic-skipped_steps"]) == (2.0, 2.0)
    assert row["train/critic-value_loss"] == 1.0
    assert row["perf/weights_gbytes"] == 1.0
