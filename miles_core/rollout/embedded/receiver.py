"""The embedded engine as the end of a push by broadcast."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from miles_core.device import current_device
from miles_core.rollout.engine import RolloutEngine
from miles_core.weight_sync.broadcast import open_group
from miles_core.weight_sync.bucket import WeightBucket
from miles_core.weight_sync.digest import digests_in_rows, named_digests
from miles_core.weight_sync.layout import Layout
from miles_core.weight_sync.sender import PushedBucket


class EmbeddedReceiver:
    """See `PushReceiver` for the calls. The engine is in one process with its caller, so nothing is paused, and all
    tensors are replaced at the end or none."""

    num_ranks = 1
    may_lack: frozenset[str] = frozenset()

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._group: dist.ProcessGroup | None = None
        self._buckets: list[WeightBucket] = []
        self._digests: dict[str, str] = {}

    def join_group(self, address: str, port: int, first_rank: int, world_size: int, backend: str) -> None:
        self._group = open_group(address, port, first_rank, world_size, backend)

    def leave_group(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def receive_bucket(self, bucket: PushedBucket) -> bool:
        if bucket.first:
            self._buckets, self._digests = [], {}
        flat = torch.empty(bucket.layout.nbytes, dtype=torch.uint8, device=current_device())
        dist.broadcast(flat, src=0, group=self._group)
        if bucket.keep_paused:
            layout, digests = digests_in_rows(bucket.layout.forms, bucket.layout.views(flat))
            self._digests |= named_digests(digests, layout.specs)
        self._buckets.append(WeightBucket(bucket.layout.specs, flat.cpu().numpy()))
        if bucket.last:
            buckets, self._buckets = self._buckets, []
            self._engine.update_weights(buckets, bucket.version)
        return True

    def held_digests(self, layouts: Sequence[Layout]) -> dict[str, str] | None:
        """Of what arrived in the last push, which `update_weights` has put into the model."""
        return self._digests

    def end_push(self) -> bool:
        return True
