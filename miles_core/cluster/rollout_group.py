"""Rollout engines as Ray actors: requests are shared out, weights go to all."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch

from miles_core.cluster.session import resolve
from miles_core.config.run import RunConfig
from miles_core.rollout.engine import Completion, GenerateRequest
from miles_core.rollout.factory import build_engine
from miles_core.weight_sync.bucket import WeightBucket
from miles_core.weight_sync.push import check_digests


@ray.remote(num_cpus=0, max_restarts=0)
class EngineProcess:
    """One engine in a process of its own."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        torch.set_num_threads(config.cluster.threads_per_process)
        self._engine = build_engine(config, folder)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return self._engine.generate(requests)

    def update_weights(self, version: int, *buckets: WeightBucket) -> dict[str, str]:
        """Takes all buckets (Ray resolves the references to shared memory) and answers with what it now holds."""
        self._engine.update_weights(buckets, version)
        return self._engine.weight_digests()


class RolloutGroup:
    """All engines of a run."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        start = EngineProcess.remote  # type: ignore[attr-defined]  # the decorator's
        self._engines = [start(config, folder) for _ in range(config.rollout.num_engines)]
        resolve([engine.generate.remote([]) for engine in self._engines])  # loaded, or the fault is raised here

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answers in the order of the requests; each engine takes one contiguous share, so that the equal prompts of
        a group meet in one engine."""
        count = len(self._engines)
        cuts = [len(requests) * i // count for i in range(count + 1)]
        shares = [requests[start:end] for start, end in pairwise(cuts)]
        answers = [engine.generate.remote(share) for engine, share in zip(self._engines, shares, strict=True)]
        return [completion for share in resolve(answers) for completion in share]

    def update_weights(self, buckets: Sequence[Any], digests: Mapping[str, str], version: int) -> None:
        """Pushes to every engine and proves that each holds what was sent."""
        held = resolve([engine.update_weights.remote(version, *buckets) for engine in self._engines])
        for number, found in enumerate(held):
            check_digests(digests, found, f"engine {number}")

    def close(self) -> None:
        for engine in self._engines:
            ray.kill(engine)
