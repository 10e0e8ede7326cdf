"""Pushes to engines on the same machine: they read the trainer's own device memory, nothing is sent."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles_core.device import current_device, synchronize
from miles_core.weight_sync.digest import bucket_digests, named_digests
from miles_core.weight_sync.layout import Layout, in_rows
from miles_core.weight_sync.packing import PackedBucket
from miles_core.weight_sync.sender import Delivery, PushedBucket, Receiver, Sender

_NOTHING = 0xFF  # each byte of what an engine does not write when it is read

MakeHandle = Callable[..., str]
"""(action "load" or "read", layout, flat buffer, first, last) -> the buffer as one process of an engine takes it."""


class SharedMemorySender(Sender):
    """Engines take buckets by handle. Those of the two buffers stay the same, so engines keep them mapped."""

    def __init__(self, bucket_bytes: int, make_handle: MakeHandle) -> None:
        super().__init__(bucket_bytes, in_rows)
        self._make_handle = make_handle

    def _send(
        self, bucket: PackedBucket, receivers: dict[int, Receiver], version: int, *, keep_paused: bool
    ) -> dict[int, Delivery]:
        first, ends = bucket.number == 0, bucket.last and not keep_paused
        started = {}
        for i, receiver in receivers.items():
            handles = tuple(
                self._make_handle("load", bucket.layout, bucket.flat, first=first, last=ends)
                for _ in range(receiver.num_ranks)
            )
            message = PushedBucket(bucket.layout, handles, version, first, bucket.last, keep_paused)
            started[i] = receiver.start("load_bucket", message)
        return started

    def _digests(self, bucket: PackedBucket) -> tuple[Layout, Tensor]:
        return bucket.layout, bucket_digests(bucket.flat, bucket.layout.specs)

    def _held(self, layouts: Sequence[Layout], receiver: Receiver) -> dict[str, str] | None:
        return read_back(layouts, receiver, self._make_handle, self._buffer)


def read_back(
    layouts: Sequence[Layout],
    receiver: Receiver,
    make_handle: MakeHandle,
    buffer: Callable[[int, int], Tensor] | None = None,
) -> dict[str, str] | None:
    """Digests of what an engine holds, by name, without the tensors that it does not hold; None where it was lost.

    Args:
        layouts: of the buckets to ask for.
        receiver: the engine, asked through its `read_bucket`.
        make_handle: see `MakeHandle`.
        buffer: memory of this process's device, by number and bytes; a new one where there is none to use.
    """
    held: dict[str, str] = {}
    own = None if buffer else torch.empty(max(la.nbytes for la in layouts), dtype=torch.uint8, device=current_device())
    for number, layout in enumerate(layouts):
        flat = (buffer(number, layout.nbytes) if own is None else own)[: layout.nbytes]  # type: ignore[misc]
        flat.fill_(_NOTHING)
        nothing = _digests(layout, flat)
        last = number + 1 == len(layouts)
        handles = tuple(make_handle("read", layout, flat, first=False, last=last) for _ in range(receiver.num_ranks))
        if not receiver.start("read_bucket", handles).result():
            return None
        held |= {name: digest for name, digest in _digests(layout, flat).items() if digest != nothing[name]}
    return held


def _digests(layout: Layout, flat: Tensor) -> dict[str, str]:
    if paddings := layout.paddings(flat):
        torch._foreach_zero_(paddings)
    digests = named_digests(bucket_digests(flat, layout.specs), layout.specs)
    synchronize()
    return digests
