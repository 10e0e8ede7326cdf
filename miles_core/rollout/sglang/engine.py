"""SGLang behind the RolloutEngine protocol."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conversion.families import geometry_from_config
from conversion.safetensors_header import read_headers
from miles_core.config.rollout import SglangConfig
from miles_core.rollout.engine import Completion, GenerateRequest, WeightsNeededError
from miles_core.rollout.sglang.client import ServerLost, post, post_all
from miles_core.rollout.sglang.loader import LOADER
from miles_core.rollout.sglang.receiver import ServerWeights, not_kept
from miles_core.rollout.sglang.server import SglangServer
from miles_core.rollout.sglang.weights import make_handle
from miles_core.rollout.sglang.wire import generate_payload, to_completion
from miles_core.weight_sync.bucket import WeightBucket, tensor_digest
from miles_core.weight_sync.completeness import check_complete
from miles_core.weight_sync.local import local_receiver
from miles_core.weight_sync.shared import SharedMemorySender

Part = list[GenerateRequest]


class SglangEngine:
    """One server and its client. A server that dies is started again, given the weights last pushed, and asked again
    for what was lost; answers that had already come are kept, so nothing is counted twice."""

    def __init__(
        self,
        folder: Path,
        settings: SglangConfig,
        *,
        bucket_bytes: int = 512 * 2**20,
        module: str = "sglang.launch_server",
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        geometry = geometry_from_config(config)
        self._settings = settings
        self._layers = geometry.num_layers
        self._top_k = geometry.moe.top_k if geometry.moe else None
        self._held = {name: (spec.dtype, spec.shape) for name, spec in read_headers(folder).items()}
        self._host_copy: tuple[Sequence[WeightBucket], int] | None = None
        self._digests: dict[str, str] = {}
        args: dict[str, Any] = {"skip_server_warmup": True, "weight_version": "0", **settings.server_args}
        args["custom_weight_loader"] = LOADER
        if settings.release_in_training:
            args["enable_memory_saver"] = True
        if self._top_k is not None:
            args["enable_return_routed_experts"] = True
        self._deterministic = bool(args.get("enable_deterministic_inference"))
        self._server = SglangServer(
            folder,
            args,
            startup_timeout=settings.startup_timeout,
            max_restarts=settings.max_restarts,
            module=module,
        )
        not_held = not_kept(list(self._held), self._layers, drafts=settings.drafts)
        self._receiver = ServerWeights(self._server, self._held, settings.num_ranks, not_held)
        self._sender = SharedMemorySender(bucket_bytes, make_handle)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        size = self._settings.requests_per_call
        open_parts = {i: list(requests[i : i + size]) for i in range(0, len(requests), size)}
        done: dict[int, list[Completion]] = {}
        if self._receiver.needed:
            raise WeightsNeededError([])
        while open_parts:
            answers = asyncio.run(
                post_all(
                    self._server.url,
                    "/generate",
                    [self._payload(part) for part in open_parts.values()],
                    max_calls=self._settings.max_calls,
                )
            )
            lost: dict[int, Part] = {}
            for (start, part), answer in zip(open_parts.items(), answers, strict=True):
                if isinstance(answer, ServerLost):
                    lost[start] = part
                else:
                    done[start] = self._completions(part, answer)
            if lost:
                self._replace_server(_in_order(done))
            open_parts = lost
        return _in_order(done)

    def _payload(self, part: Part) -> dict[str, Any]:
        return generate_payload(part, routed_experts=self._top_k is not None, deterministic=self._deterministic)

    def _completions(self, part: Part, answers: list[Any]) -> list[Completion]:
        return [
            to_completion(
                request, answer, layers=self._layers, top_k=self._top_k, default_version=self.weight_version()
            )
            for request, answer in zip(part, answers, strict=True)
        ]

    def _replace_server(self, answered: list[Completion]) -> None:
        self._receiver.replace_server()
        if self._receiver.needed:
            if self._host_copy is None or self._host_copy[1] != self._receiver.version:
                raise WeightsNeededError(answered)
            self._push(*self._host_copy)

    def update_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        """From memory of the host, by way of this process's device; the buckets are kept for a server that dies."""
        check_complete(buckets, self._held)
        self._push(buckets, version)
        self._host_copy = (buckets, version)
        self._digests = {name: tensor_digest(tensor) for bucket in buckets for name, tensor in bucket.tensors()}

    def _push(self, buckets: Sequence[WeightBucket], version: int) -> None:
        receiver = local_receiver(self._receiver, "the SGLang server")
        lost = True
        while lost:  # the server can die meanwhile, as often as max_restarts allows
            named = (pair for bucket in buckets for pair in bucket.tensors())
            lost = bool(self._sender.push(named, [receiver], version, verify=True).lost)

    def push_receiver(self) -> ServerWeights:
        return self._receiver

    def weight_version(self) -> int:
        return self._receiver.version

    def weight_digests(self) -> dict[str, str]:
        """Of what `update_weights` was given. The push itself has proven that the server holds it."""
        return self._digests

    def abort(self) -> None:
        """Ends all requests; they come back with finish reason "abort" and what they have."""
        post(self._server.url, "/abort_request", {"abort_all": True})

    def close(self) -> None:
        self._server.close()


def _in_order(parts: dict[int, list[Completion]]) -> list[Completion]:
    return [completion for start in sorted(parts) for completion in parts[start]]
