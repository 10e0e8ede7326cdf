"""Rollout engines as Ray actors: requests are shared out, weights go to all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch

from miles_core.cluster.session import resolve
from miles_core.config.run import RunConfig
from miles_core.rollout.engine import Completion, GenerateRequest, WeightsNeededError
from miles_core.rollout.factory import build_engine
from miles_core.weight_sync.bucket import WeightBucket
from miles_core.weight_sync.push import check_digests
from miles_core.weight_sync.sender import Receiver

_CLOSING = 20  # seconds


@ray.remote(num_cpus=0, max_restarts=0)
class EngineProcess:
    """One engine in a process of its own."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        torch.set_num_threads(config.cluster.threads_per_process)
        self._engine = build_engine(config, folder)
        self._receiver = self._engine.push_receiver()

    def generate(self, requests: Sequence[GenerateRequest]) -> tuple[list[Completion], bool]:
        """Completions, and whether these are all: without a server's weights they are not."""
        try:
            return self._engine.generate(requests), True
        except WeightsNeededError as error:
            return error.completions, False

    def update_weights(self, version: int, *buckets: WeightBucket) -> dict[str, str]:
        """Takes all buckets (Ray resolves the references to shared memory) and answers with what it now holds."""
        self._engine.update_weights(buckets, version)
        return self._engine.weight_digests()

    def push_call(self, method: str, *arguments: Any) -> Any:
        """One call of a push; see `PushReceiver`."""
        return getattr(self._receiver, method)(*arguments)

    def about(self) -> tuple[int, frozenset[str], str]:
        """Processes that hold weights, tensors that the engine may lack, and Ray's id of the machine."""
        return self._receiver.num_ranks, self._receiver.may_lack, ray.get_runtime_context().get_node_id()

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class EngineHandle:
    """An engine as a push finds it from another process."""

    process: Any  # Ray's handle
    name: str
    num_ranks: int
    may_lack: frozenset[str]
    node: str

    def receiver(self) -> Receiver:
        def start(method: str, *arguments: Any) -> "_Call":
            return _Call(self.process.push_call.remote(method, *arguments))

        return Receiver(start, self.name, self.num_ranks, self.may_lack)


@dataclass(frozen=True)
class _Call:
    """A `Delivery`."""

    reference: Any

    def done(self) -> bool:
        return bool(ray.wait([self.reference], timeout=0)[0])

    def result(self) -> Any:
        return resolve(self.reference)


class RolloutGroup:
    """All engines of a run."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        start = EngineProcess.remote  # type: ignore[attr-defined]  # the decorator's
        self._engines = [start(config, folder) for _ in range(config.rollout.num_engines)]
        about = resolve([engine.about.remote() for engine in self._engines])  # loaded, or the fault is raised here
        self.handles = [
            EngineHandle(process, f"engine {number}", *facts)
            for number, (process, facts) in enumerate(zip(self._engines, about, strict=True))
        ]
        self.push_again: Callable[[Sequence[int]], None] | None = None  # set by who pushes without copies on the host

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answers in the order of the requests; each engine takes one contiguous share, so that the equal prompts of
        a group meet in one engine. One that lost its weights gets them again, and is asked for what is missing."""
        count = len(self._engines)
        cuts = [len(requests) * i // count for i in range(count + 1)]
        open_shares = {i: list(requests[start:end]) for i, (start, end) in enumerate(pairwise(cuts))}
        answered: dict[str, Completion] = {}
        while open_shares:
            calls = [self._engines[i].generate.remote(share) for i, share in open_shares.items()]
            lost: dict[int, list[GenerateRequest]] = {}
            for (i, share), (completions, complete) in zip(open_shares.items(), resolve(calls), strict=True):
                answered |= {completion.request_id: completion for completion in completions}
                if not complete:
                    lost[i] = [request for request in share if request.request_id not in answered]
            if lost:
                assert self.push_again is not None
                self.push_again(list(lost))
            open_shares = lost
        return [answered[request.request_id] for request in requests]

    def update_weights(self, buckets: Sequence[Any], digests: Mapping[str, str], version: int) -> None:
        """Pushes to every engine and proves that each holds what was sent."""
        held = resolve([engine.update_weights.remote(version, *buckets) for engine in self._engines])
        for handle, found in zip(self.handles, held, strict=True):
            check_digests(digests, found, handle.name)

    def release_memory(self, tags: Sequence[str]) -> None:
        """Engines give device memory away until the next push; none may be at work."""
        resolve([engine.push_call.remote("release_memory", tags) for engine in self._engines])

    def close(self) -> None:
        with suppress(Exception):  # a server outlives its engine's process unless it is told to end
            ray.get([engine.close.remote() for engine in self._engines], timeout=_CLOSING)
        for engine in self._engines:
            ray.kill(engine)
