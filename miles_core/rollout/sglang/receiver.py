"""An SGLang server as the engine's end of a push."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from miles_core.rollout.sglang import weights
from miles_core.rollout.sglang.client import ServerLost
from miles_core.rollout.sglang.server import SglangServer
from miles_core.weight_sync.completeness import HeldForm, PushAccount
from miles_core.weight_sync.layout import Layout
from miles_core.weight_sync.local import local_receiver
from miles_core.weight_sync.sender import PushedBucket
from miles_core.weight_sync.shared import read_back

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_SHARED_WITH_TARGET = ("embed_tokens.weight", "shared_head.head.weight")


class ServerWeights:
    """The weights of one server: pushed (see `SharedMemoryReceiver` for the calls), released, and lost with it."""

    def __init__(
        self, server: SglangServer, held: Mapping[str, HeldForm], num_ranks: int, may_lack: frozenset[str]
    ) -> None:
        """`held`: the tensors that a push must bring; `may_lack`: those of them that the server does not keep."""
        self._server, self._held = server, held
        self.num_ranks, self.may_lack = num_ranks, may_lack
        self._account: PushAccount | None = None  # of the push in progress
        self._in_group = False
        self._released: tuple[str, ...] = ()
        self.version = 0  # of the last complete push
        self.needed = False  # a push is: the server holds others than those of `version`, or parts of two

    def replace_server(self) -> None:
        """Starts another server, which has the weights that lie on disk."""
        self._server.restart()
        self._account, self._in_group, self._released = None, False, ()
        self.needed = self.version > 0

    def load_bucket(self, bucket: PushedBucket) -> bool:
        return self._take(bucket, lambda url, version: weights.load(url, bucket.handles, version))

    def receive_bucket(self, bucket: PushedBucket) -> bool:
        def receive(url: str, version: int | None) -> None:
            weights.receive(url, bucket.layout, version)
            if bucket.last:
                weights.refresh(url, self.num_ranks)

        return self._take(bucket, receive)

    def read_bucket(self, handles: Sequence[str]) -> bool:
        return self._survives(lambda url: weights.read(url, handles))

    def held_digests(self, layouts: Sequence[Layout]) -> dict[str, str] | None:
        """By way of a buffer of this process on the server's machine."""
        return read_back(layouts, local_receiver(self), weights.make_handle)

    def end_push(self) -> bool:
        return self._survives(self._end)

    def join_group(self, address: str, port: int, first_rank: int, world_size: int, backend: str) -> None:
        weights.join_group(self._server.url, address, port, first_rank, world_size, backend)
        self._in_group = True

    def leave_group(self) -> None:
        if self._in_group:
            self._in_group = False
            with suppress(ServerLost):  # then it has left
                weights.leave_group(self._server.url)

    def release_memory(self, tags: Sequence[str]) -> None:
        """Until the next push; the server must be idle."""
        weights.release_memory(self._server.url, tags)
        self._released = tuple(tags)
        self.needed = self.needed or "weights" in tags

    def _take(self, bucket: PushedBucket, into_server: Callable[[str, int | None], None]) -> bool:
        if bucket.first:
            self._account = PushAccount(self._held)
        if self._account is None:  # of a push that the server did not survive
            return False
        self._account.take(bucket.layout.specs)
        if bucket.last:
            self._account.finish()

        def calls(url: str) -> None:
            if bucket.first:
                self.needed = True
                weights.pause(url)
                self._resume_memory(url, "weights")
            into_server(url, bucket.version if bucket.last else None)
            if bucket.last:
                self.version = bucket.version
                if not bucket.keep_paused:
                    self._end(url)

        return self._survives(calls)

    def _end(self, url: str) -> None:
        self._account, self.needed = None, False
        self._resume_memory(url, "kv_cache")
        weights.resume(url)

    def _resume_memory(self, url: str, tag: str) -> None:
        if tag in self._released:
            weights.resume_memory(url, [tag])
            self._released = tuple(other for other in self._released if other != tag)

    def _survives(self, calls: Callable[[str], None]) -> bool:
        try:
            calls(self._server.url)
        except ServerLost:
            self.replace_server()
            return False
        return True


def not_kept(names: Sequence[str], num_layers: int, *, drafts: bool) -> frozenset[str]:
    """Tensors of a checkpoint that a server does not keep: all of the MTP layers where it does not draft with them, and
    where it does, their copies of embedding and head, for which it uses the model's own."""
    mtp = [name for name in names if (layer := _LAYER.match(name)) and int(layer[1]) >= num_layers]
    return frozenset(name for name in mtp if not drafts or name.endswith(_SHARED_WITH_TARGET))
