"""SGLang behind the RolloutEngine protocol."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conversion.families import geometry_from_config
from conversion.safetensors_header import read_headers
from miles_core.config.rollout import SglangConfig
from miles_core.rollout.engine import Completion, GenerateRequest
from miles_core.rollout.sglang.client import ServerLost, post, post_all
from miles_core.rollout.sglang.server import SglangServer
from miles_core.rollout.sglang.weights import push
from miles_core.rollout.sglang.wire import generate_payload, to_completion
from miles_core.weight_sync.bucket import WeightBucket, tensor_digest
from miles_core.weight_sync.completeness import check_complete

Part = list[GenerateRequest]


class SglangEngine:
    """One server and its client. A server that dies is started again, given the weights last pushed, and asked again
    for what was lost; answers that had already come are kept, so nothing is counted twice."""

    def __init__(self, folder: Path, settings: SglangConfig, *, module: str = "sglang.launch_server") -> None:
        config = json.loads((folder / "config.json").read_text())
        geometry = geometry_from_config(config)
        self._settings = settings
        self._layers = geometry.num_layers
        self._top_k = geometry.moe.top_k if geometry.moe else None
        self._held = {name: (spec.dtype, spec.shape) for name, spec in read_headers(folder).items()}
        self._pushed: tuple[Sequence[WeightBucket], int] | None = None
        self._digests: dict[str, str] = {}
        args: dict[str, Any] = {"skip_server_warmup": True, "weight_version": "0", **settings.server_args}
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

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        size = self._settings.requests_per_call
        open_parts = {i: list(requests[i : i + size]) for i in range(0, len(requests), size)}
        done: dict[int, list[Completion]] = {}
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
                self._revive()
            open_parts = lost
        return [completion for start in sorted(done) for completion in done[start]]

    def _payload(self, part: Part) -> dict[str, Any]:
        return generate_payload(part, routed_experts=self._top_k is not None, deterministic=self._deterministic)

    def _completions(self, part: Part, answers: list[Any]) -> list[Completion]:
        return [
            to_completion(
                request, answer, layers=self._layers, top_k=self._top_k, default_version=self.weight_version()
            )
            for request, answer in zip(part, answers, strict=True)
        ]

    def _revive(self) -> None:
        self._server.restart()
        if self._pushed is not None:
            push(self._server.url, *self._pushed)

    def update_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        check_complete(buckets, self._held)
        try:
            push(self._server.url, buckets, version)
        except ServerLost:
            self._server.restart()
            push(self._server.url, buckets, version)
        self._pushed = (buckets, version)
        self._digests = {name: tensor_digest(tensor) for bucket in buckets for name, tensor in bucket.tensors()}

    def weight_version(self) -> int:
        return 0 if self._pushed is None else self._pushed[1]

    def weight_digests(self) -> dict[str, str]:
        """Of what the server accepted. What it keeps is fused and laid out anew: tests/gpu compares its own checksums
        with those after loading the same weights from disk."""
        return self._digests

    def abort(self) -> None:
        """Ends all requests; they come back with finish reason "abort" and what they have."""
        post(self._server.url, "/abort_request", {"abort_all": True})

    def close(self) -> None:
        self._server.close()
