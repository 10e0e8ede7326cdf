"""The trainer's side of a push: buckets to all engines, one packed while the one before it is taken, and the proof of
what they then hold. How the bytes get there is in shared.py and broadcast.py.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from miles_core.device import current_device, synchronize
from miles_core.weight_sync.bucket import WeightSyncError
from miles_core.weight_sync.digest import named_digests
from miles_core.weight_sync.layout import Form, Layout
from miles_core.weight_sync.packing import NamedTensor, PackedBucket, Packer
from miles_core.weight_sync.push import check_digests


class Delivery(Protocol):
    """A call to an engine that runs meanwhile."""

    def done(self) -> bool: ...

    def result(self) -> Any:
        """Waits; raises what the call raised."""
        ...


@dataclass(frozen=True)
class Receiver:
    """An engine that takes pushes, in this process or another.

    `start(method, *arguments)` begins a call of it (see `PushReceiver`); calls run in order.
    `num_ranks` processes of the engine take each bucket. `may_lack`: tensors that it takes and does not keep, such as
    the MTP layers where nothing drafts.
    """

    start: Callable[..., Delivery]
    name: str = "the engine"
    num_ranks: int = 1
    may_lack: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PushedBucket:
    """One bucket on its way to one engine. `last` ends the push, unless `keep_paused`: then `end_push` does."""

    layout: Layout
    handles: tuple[str, ...]  # of its memory, one for each process of the engine; empty for a broadcast
    version: int
    first: bool
    last: bool
    keep_paused: bool


class PushReceiver(Protocol):
    """What an engine does during a push. The answer is False, or None, where it has lost its weights meanwhile and
    needs the push anew.

    WeightSyncError is raised for tensors that the engine does not know, before they are touched, and with the last
    bucket for missing ones; generation then stays paused.
    """

    num_ranks: int
    may_lack: frozenset[str]

    def join_group(self, address: str, port: int, first_rank: int, world_size: int, backend: str) -> None:
        """Waits until the group for broadcasts is complete; leaves with `leave_group`."""
        ...

    def leave_group(self) -> None: ...

    def receive_bucket(self, bucket: PushedBucket) -> bool:
        """Puts a bucket into the model that rank 0 broadcasts meanwhile; the first one pauses generation."""
        ...

    def held_digests(self, layouts: Sequence[Layout]) -> dict[str, str] | None:
        """Of the tensors that the engine holds, in the form of `named_digests`."""
        ...

    def end_push(self) -> bool:
        """Generation goes on, with the new weights."""
        ...


class SharedMemoryReceiver(PushReceiver, Protocol):
    """An engine that also takes buckets from the trainer's own memory."""

    def load_bucket(self, bucket: PushedBucket) -> bool:
        """As `receive_bucket`, by the bucket's handles."""
        ...

    def read_bucket(self, handles: Sequence[str]) -> bool:
        """Writes what the model holds over the buffer."""
        ...


@dataclass
class PushReport:
    """What a push did."""

    nbytes: int = 0
    buckets: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("pack", "deliver", "verify"), 0.0))
    lost: set[int] = field(default_factory=set)  # receivers that need the push anew
    verified: int = 0  # tensors that engines hold with equal digests
    total_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """pack: gathering, quantizing and packing; deliver: waiting for engines beyond that; verify: the proof."""
        return {
            "perf/weights_gbytes": self.nbytes / 1e9,
            "perf/weights_gbytes_per_sec": self.nbytes / 1e9 / self.total_seconds,
            "perf/weights_buckets": float(self.buckets),
            "perf/weights_verified_tensors": float(self.verified),
            **{f"perf/weights_{part}_time": seconds for part, seconds in self.seconds.items()},
        }


class Sender(ABC):
    """Keeps two buckets of device memory from push to push."""

    def __init__(self, bucket_bytes: int, lay_out: Callable[[list[Form]], Layout]) -> None:
        self._packer = Packer(bucket_bytes, lay_out, self._buffer)
        self._buffers: list[Tensor | None] = [None, None]
        self._running: dict[int, dict[int, Delivery]] = {}  # by bucket, by receiver
        self._report = PushReport()

    def push(
        self, named_tensors: Iterable[NamedTensor], receivers: Sequence[Receiver], version: int, *, verify: bool
    ) -> PushReport:
        """Sends all tensors to all receivers; those in the report's `lost` have to be sent them again.

        Raises:
            WeightSyncError: there are no tensors, an engine refuses some, or with `verify` it holds something else
                than what was sent. Its generation stays paused: it has neither the old nor the new weights.
        """
        start = time.perf_counter()
        report = self._report = PushReport()
        self._running.clear()
        sent: list[tuple[Layout, Tensor]] = []
        packed = self._packer.pack(named_tensors)
        while (bucket := self._timed("pack", lambda: next(packed, None))) is not None:
            if verify:
                sent.append(self._digests(bucket))
            synchronize()  # the bytes must be there before an engine hears of them
            report.nbytes += sum(spec.nbytes for spec in bucket.layout.specs)
            report.buckets += 1
            there = {i: receiver for i, receiver in enumerate(receivers) if i not in report.lost}
            self._running[bucket.number] = self._send(bucket, there, version, keep_paused=verify)
        if not report.buckets:
            raise WeightSyncError("a push without tensors: the trainer has none to send")
        for number in list(self._running):
            self._settle(number)
        if verify:
            self._timed("verify", lambda: self._verify(sent, receivers))
        report.total_seconds = time.perf_counter() - start
        return report

    @abstractmethod
    def _send(
        self, bucket: PackedBucket, receivers: dict[int, Receiver], version: int, *, keep_paused: bool
    ) -> dict[int, Delivery]:
        """Starts the bucket's way to all receivers; each delivery's result is False where the receiver was lost."""

    @abstractmethod
    def _digests(self, bucket: PackedBucket) -> tuple[Layout, Tensor]:
        """Of the bucket's tensors, and the layout in whole rows that they are in."""

    @abstractmethod
    def _held(self, layouts: Sequence[Layout], receiver: Receiver) -> dict[str, str] | None:
        """Digests of what a receiver holds; None where it was lost."""

    def _buffer(self, number: int, nbytes: int) -> Tensor:
        """Of bucket `number`, at least `nbytes`, once nobody reads bucket `number - 2` there."""
        self._settle(number - 2)
        held = self._buffers[number % 2]
        if held is None or len(held) < nbytes:
            held = self._buffers[number % 2] = torch.empty(nbytes, dtype=torch.uint8, device=current_device())
        return held

    def _settle(self, number: int) -> None:
        """Waits until every receiver has taken bucket `number`."""
        for i, delivery in self._running.pop(number, {}).items():
            if not self._timed("deliver", delivery.result):
                self._report.lost.add(i)

    def _verify(self, sent: Sequence[tuple[Layout, Tensor]], receivers: Sequence[Receiver]) -> None:
        expected = {name: d for layout, found in sent for name, d in named_digests(found, layout.specs).items()}
        for i, receiver in enumerate(receivers):
            if i in self._report.lost:
                continue
            held = self._held([layout for layout, _ in sent], receiver)
            if held is not None:
                check_digests(expected, held, receiver.name, may_lack=receiver.may_lack)
                self._report.verified += len(held)
            if held is None or not receiver.start("end_push").result():
                self._report.lost.add(i)

    def _timed(self, part: str, call: Callable[[], Any]) -> Any:
        start, waited = time.perf_counter(), self._report.seconds["deliver"]
        try:
            return call()
        finally:
            took = time.perf_counter() - start
            if part != "deliver":  # packing waits for deliveries; each second counts once
                took -= self._report.seconds["deliver"] - waited
            self._report.seconds[part] += took
