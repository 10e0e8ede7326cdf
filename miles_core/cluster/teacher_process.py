"""The teachers of distillation as a Ray actor, behind the Teacher protocol."""

from collections.abc import Sequence
from pathlib import Path

import ray
import torch

from miles_core.cluster.session import resolve
from miles_core.config.run import RunConfig
from miles_core.rollout.teachers import EmbeddedTeachers, TeacherScores
from miles_core.types import TrainSample


@ray.remote(num_cpus=0, max_restarts=0)
class TeacherProcess:
    """All teachers in one process of their own."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.cluster.threads_per_process)
        self._config = config

    def start(self, policy_folder: Path) -> None:
        self._teachers = EmbeddedTeachers(self._config, policy_folder)

    def score(self, batch: Sequence[TrainSample]) -> TeacherScores:
        return self._teachers.score(batch)


class TeacherGroup:
    """See miles_core/rollout/teachers.py for the calls."""

    def __init__(self, config: RunConfig, policy_folder: Path) -> None:
        self._process = TeacherProcess.remote(config)  # type: ignore[attr-defined]  # the decorator's
        resolve(self._process.start.remote(policy_folder))  # loaded, or the fault is raised here

    def score(self, batch: Sequence[TrainSample]) -> TeacherScores:
        return resolve(self._process.score.remote(list(batch)))

    def close(self) -> None:
        ray.kill(self._process)
