"""The trainer's ranks as Ray actors, behind the Trainer protocol."""

import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch

from conversion.geometry import ModelGeometry
from conversion.quantization.codec import codec_for
from miles_core.cluster.rollout_group import EngineHandle
from miles_core.cluster.session import resolve
from miles_core.config.run import RunConfig
from miles_core.device import empty_cache, peak_memory
from miles_core.rollout.sglang.weights import make_handle
from miles_core.types import TrainSample
from miles_core.weight_sync.broadcast import BroadcastSender
from miles_core.weight_sync.bucket import bucketize, tensor_digest
from miles_core.weight_sync.push import encode_weights
from miles_core.weight_sync.sender import PushReport, Sender
from miles_core.weight_sync.shared import SharedMemorySender
from miles_core.weight_sync.transport import transport_of


@ray.remote(num_cpus=0, max_restarts=0)
class TrainRank:
    """One rank: a process that holds a shard of the model."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        torch.set_num_threads(config.cluster.threads_per_process)
        self._config, self._rank = config, rank
        self._sender: Sender | None = None

    def address(self) -> str:
        """A host and free port of this process, for rank 0's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, geometry: ModelGeometry, checkpoint: Path, init_method: str) -> None:
        from miles_core.trainer.megatron.trainer import MegatronTrainer

        self._trainer = MegatronTrainer(
            self._config,
            geometry,
            rank=self._rank,
            world_size=self._config.trainer.num_ranks,
            init_method=init_method,
            checkpoint=checkpoint,
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """One protocol call. Results are the same on every rank; only rank 0 sends them back."""
        result = getattr(self._trainer, method)(*arguments)
        return result if self._rank == 0 else None

    def weight_buckets(self, quantized: frozenset[str]) -> tuple[list[Any], dict[str, str]] | None:
        """Rank 0: references to the buckets of all weights as an engine takes them, and each tensor's digest."""
        weights = self._encoded_weights(quantized)
        digests: dict[str, str] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                digests[name] = tensor_digest(tensor)
                yield name, tensor

        if self._rank != 0:
            _take_part(weights)
            return None
        return [ray.put(bucket) for bucket in bucketize(noted(), self._config.weight_sync.bucket_bytes)], digests

    def push_weights(
        self, quantized: frozenset[str], engines: Sequence[EngineHandle], version: int, verify: bool
    ) -> PushReport | None:
        """Rank 0: all weights to the engines, without a copy on the host; what became of them."""
        weights = self._encoded_weights(quantized)
        if self._rank != 0:
            _take_part(weights)
            return None
        return self._opened_sender().push(weights, [engine.receiver() for engine in engines], version, verify=verify)

    def leave_group(self) -> None:
        """Rank 0: the next broadcast meets the engines anew."""
        if isinstance(self._sender, BroadcastSender):
            self._sender.close()

    def node(self) -> str:
        """Ray's id of this machine."""
        return ray.get_runtime_context().get_node_id()

    def free_memory(self, for_engines: bool) -> float:
        """Most GB of the device that this rank has held since the last call; `for_engines`: what it does not use now
        goes back to the device."""
        if for_engines:
            empty_cache()
        return peak_memory() / 1e9

    def _encoded_weights(self, quantized: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        codec = codec_for(self._config.quantize.format, self._config.quantize.group_size)
        return encode_weights(self._trainer.named_weights(), codec, quantized)

    def _opened_sender(self) -> Sender:
        if self._sender is None:
            settings = self._config.weight_sync
            if transport_of(self._config) == "broadcast":
                self._sender = BroadcastSender(settings.bucket_bytes, ray.util.get_node_ip_address())
            else:
                self._sender = SharedMemorySender(settings.bucket_bytes, make_handle)
        return self._sender

    def weight_digests(self, quantized: frozenset[str]) -> dict[str, str] | None:
        """Rank 0: the digest of each tensor, those in `quantized` in the rollout's number format."""
        weights = self._encoded_weights(quantized)
        if self._rank != 0:
            _take_part(weights)
            return None
        return {name: tensor_digest(tensor) for name, tensor in weights}


def _take_part(weights: Iterable[Any]) -> None:
    """In the gathering alone: keeps nothing."""
    for _ in weights:
        pass


class TrainGroup:
    """All ranks as one Trainer (see miles_core/trainer/trainer.py for the calls)."""

    def __init__(self, config: RunConfig, geometry: ModelGeometry, checkpoint: Path) -> None:
        start = TrainRank.remote  # type: ignore[attr-defined]  # the decorator's
        self._ranks = [start(config, rank) for rank in range(config.trainer.num_ranks)]
        init_method = resolve(self._ranks[0].address.remote())
        resolve([rank.start.remote(geometry, checkpoint, init_method) for rank in self._ranks])

    def _all(self, method: str, *arguments: Any) -> Any:
        return resolve([rank.call.remote(method, *arguments) for rank in self._ranks])[0]

    def log_probs(self, batch: Sequence[TrainSample], model: Literal["policy", "reference"]) -> list[np.ndarray]:
        return self._all("log_probs", ray.put(list(batch)), model)

    def values(self, batch: Sequence[TrainSample]) -> list[np.ndarray]:
        return self._all("values", ray.put(list(batch)))

    def train_step(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        return self._all("train_step", ray.put(list(batch)))

    def train_critic(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        return self._all("train_critic", ray.put(list(batch)))

    def weight_buckets(self, quantized: frozenset[str]) -> tuple[list[Any], dict[str, str]]:
        """References to weight buckets in the object store, and the digest of each tensor in them."""
        return resolve([rank.weight_buckets.remote(quantized) for rank in self._ranks])[0]

    def push_weights(
        self, quantized: frozenset[str], engines: Sequence[EngineHandle], version: int, *, verify: bool
    ) -> PushReport:
        """All weights to these engines, without a copy on the host; see `Sender.push`."""
        return resolve([rank.push_weights.remote(quantized, engines, version, verify) for rank in self._ranks])[0]

    def leave_group(self) -> None:
        """The next broadcast meets the engines anew: one of them has been started again."""
        resolve(self._ranks[0].leave_group.remote())

    def node(self) -> str:
        """Ray's id of the machine that weights are pushed from."""
        return resolve(self._ranks[0].node.remote())

    def free_memory(self, *, for_engines: bool) -> float:
        """Most GB of a device that a rank has held since the last call; 0 on CPUs. `for_engines`: memory that is not
        used now goes back to the devices."""
        return max(resolve([rank.free_memory.remote(for_engines) for rank in self._ranks]))

    def weight_digests(self, quantized: frozenset[str] = frozenset()) -> dict[str, str]:
        """Digest of each tensor by Hugging Face name: as it is trained, or, of the names in `quantized`, as engines
        hold it."""
        return resolve([rank.weight_digests.remote(quantized) for rank in self._ranks])[0]

    def refresh_reference(self) -> None:
        self._all("refresh_reference")

    def save(self, folder: Path) -> None:
        self._all("save", folder)

    def load(self, folder: Path) -> None:
        self._all("load", folder)

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
