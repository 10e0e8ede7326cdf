"""Pushes to engines on other GPUs or machines, in a process group of the trainer's rank 0 and all engines' processes.

The group is made as SGLang makes its end of it, beside the trainer's own groups. NCCL between GPUs, gloo between CPUs.
"""

import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from miles_core.device import broadcast_backend, synchronize
from miles_core.weight_sync.bucket import WeightSyncError
from miles_core.weight_sync.digest import digests_in_rows
from miles_core.weight_sync.layout import Layout, without_gaps
from miles_core.weight_sync.packing import NamedTensor, PackedBucket
from miles_core.weight_sync.sender import Delivery, PushedBucket, PushReport, Receiver, Sender

GROUP = c10d.GroupName("miles_weights")
_TIMEOUT = timedelta(minutes=5)  # to meet, and for one bucket
_POLL = 0.0005  # seconds


def open_group(address: str, port: int, rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
    """Waits until all ranks are there. torch has no public call for a group beside the default one of other members;
    this is what `init_process_group` does inside, without setting the default."""
    found = c10d.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=_TIMEOUT)
    store, rank, world_size = next(found)
    store.set_timeout(_TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(backend), c10d.PrefixStore(GROUP, store), group_name=GROUP, timeout=_TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class BroadcastSender(Sender):
    """Rank 0 of the group. The group is opened with the first push and again where the engines have changed."""

    def __init__(self, bucket_bytes: int, address: str) -> None:
        """`address`: of this machine, as the engines reach it."""
        super().__init__(bucket_bytes, without_gaps)
        self._address = address
        self._group: dist.ProcessGroup | None = None
        self._members: Sequence[Receiver] = ()

    def push(
        self, named_tensors: Iterable[NamedTensor], receivers: Sequence[Receiver], version: int, *, verify: bool
    ) -> PushReport:
        """See `Sender.push`."""
        if [member.name for member in self._members] != [receiver.name for receiver in receivers]:
            self._open(receivers)
        return super().push(named_tensors, receivers, version, verify=verify)

    def close(self) -> None:
        """Leaves the group, and so do the engines. To be called before a push to one that has been started anew."""
        leaving = [member.start("leave_group") for member in self._members]
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._members = None, ()
        for delivery in leaving:
            delivery.result()

    def _open(self, receivers: Sequence[Receiver]) -> None:
        self.close()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        world_size = 1 + sum(receiver.num_ranks for receiver in receivers)
        backend = broadcast_backend()
        joining, rank = [], 1
        for receiver in receivers:
            joining.append(receiver.start("join_group", self._address, port, rank, world_size, backend))
            rank += receiver.num_ranks
        self._group = open_group(self._address, port, 0, world_size, backend)
        for delivery in joining:
            delivery.result()
        self._members = receivers

    def _send(
        self, bucket: PackedBucket, receivers: dict[int, Receiver], version: int, *, keep_paused: bool
    ) -> dict[int, Delivery]:
        assert self._group is not None
        message = PushedBucket(bucket.layout, (), version, bucket.number == 0, bucket.last, keep_paused)
        taking = {i: receiver.start("receive_bucket", message) for i, receiver in receivers.items()}
        work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        return {i: _Broadcast(work, delivery, receivers[i].name) for i, delivery in taking.items()}

    def _digests(self, bucket: PackedBucket) -> tuple[Layout, Tensor]:
        return digests_in_rows(bucket.layout.forms, bucket.layout.views(bucket.flat))

    def _held(self, layouts: Sequence[Layout], receiver: Receiver) -> dict[str, str] | None:
        return receiver.start("held_digests", layouts).result()


class _Broadcast:
    """A bucket that is broadcast: done when this process has sent it and the receiver has taken it."""

    def __init__(self, work: dist.Work, taking: Delivery, name: str) -> None:
        self._work, self._taking, self._name = work, taking, name

    def done(self) -> bool:
        return self._taking.done() and self._work.is_completed()

    def result(self) -> bool:
        """Raises WeightSyncError where the receiver refuses, dies or takes too long, instead of waiting for NCCL."""
        end = time.monotonic() + _TIMEOUT.total_seconds()
        while not self._taking.done():
            if time.monotonic() > end:
                raise WeightSyncError(f"{self._name} did not take a bucket in {_TIMEOUT}: see its log")
            time.sleep(_POLL)
        if not self._taking.result():
            raise WeightSyncError(f"{self._name} was lost during a broadcast, which leaves the others waiting")
        self._work.wait()
        synchronize()
        return True
