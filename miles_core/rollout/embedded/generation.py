"""Continuous batching: one call of `generate`, from requests to completions."""

from collections import deque
from collections.abc import Sequence
from threading import Event
from typing import Literal

import numpy as np
import torch

from miles_core.rollout.embedded.decoder import Decoder
from miles_core.rollout.embedded.forward_pass import DecodePass, PromptPass
from miles_core.rollout.embedded.prompts import pad, padded_batches
from miles_core.rollout.embedded.sampler import sample, uniform
from miles_core.rollout.embedded.token_log import TokenLog
from miles_core.rollout.engine import Completion, GenerateRequest

# Waiting requests enter when this share of the rows is free: a prompt pass costs about as much as a step of all rows.
_ADMIT_SHARE = 8

# Of a sequence being decoded.
_ROW = np.dtype(
    [
        ("request", np.int64),
        ("token", np.int64),  # sampled last, fed next
        ("length", np.int64),  # tokens in the KV cache
        ("produced", np.int64),
        ("limit", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("stop_set", np.int64),  # row of Generation._stops
    ]
)


class NonFiniteLogitsError(RuntimeError):
    """The model gave NaN or infinite logits."""


class Generation:
    """Decodes requests, as many at once as fit.

    Row i of `_rows` describes row i of the KV cache; the first `_active` are in use. Where a sequence ends, the last
    row takes its place, so that a step never computes what nobody needs.
    """

    def __init__(
        self, decoder: Decoder, requests: Sequence[GenerateRequest], eos_ids: frozenset[int], max_batch_tokens: int
    ) -> None:
        # The last token is sampled and never fed, so it takes no column.
        columns = max(len(r.prompt_ids) + r.sampling.max_new_tokens - 1 for r in requests)
        if columns > max_batch_tokens:
            raise ValueError(
                f"a request may take {columns} tokens of prompt and response, more than the {max_batch_tokens} that "
                "the engine decodes at once: raise rollout.max_batch_tokens"
            )
        self._decoder, self._requests = decoder, requests
        self._ropes = decoder.ropes(columns)
        self._cache = decoder.cache(min(len(requests), max_batch_tokens // columns), columns)
        self._rows = np.zeros(self._cache.num_rows, dtype=_ROW)
        self._active = 0
        self._waiting = deque(range(len(requests)))

        stop_sets = sorted({r.sampling.stop_token_ids for r in requests})
        self._stop_set = {stop_set: i for i, stop_set in enumerate(stop_sets)}
        self._stops = np.zeros((len(stop_sets), decoder.geometry.vocab_size), dtype=bool)
        for stops, stop_set in zip(self._stops, stop_sets, strict=True):
            stops[[*eos_ids, *stop_set]] = True

        self._tokens = TokenLog((), np.int32)
        self._log_probs = TokenLog((), np.float32)
        self._routes = TokenLog((len(decoder.moe_layers), decoder.top_k), np.int16)
        self._finish_reasons: list[Literal["stop", "length", "abort"]] = ["abort"] * len(requests)

    def run(self, abort: Event) -> None:
        """Decodes until every request has ended or `abort` is set."""
        while (self._active or self._waiting) and not abort.is_set():
            free = len(self._rows) - self._active
            if self._waiting and (free * _ADMIT_SHARE >= len(self._rows)):
                self._admit(free)
            if self._active:
                self._step()

    def completions(self, version: int) -> list[Completion]:
        """One for each request, in their order; those that haven't ended are marked as aborted."""
        count = len(self._requests)
        logs = (log.split(count) for log in (self._tokens, self._log_probs, self._routes))
        return [
            Completion(
                request_id=request.request_id,
                output_ids=tokens,
                log_probs=log_probs,
                finish_reason=finish_reason,
                weight_versions=np.full(len(tokens), version, dtype=np.int32),
                routed_experts=self._decoder.all_layers(routes) if len(routes) else None,
            )
            for request, finish_reason, tokens, log_probs, routes in zip(
                self._requests, self._finish_reasons, *logs, strict=True
            )
        ]

    def _admit(self, count: int) -> None:
        """Takes up to `count` waiting requests into rows; requests with equal prompts share one run of it."""
        by_prompt: dict[bytes, list[int]] = {}
        for _ in range(min(count, len(self._waiting))):
            request = self._waiting.popleft()
            by_prompt.setdefault(self._requests[request].prompt_ids.tobytes(), []).append(request)
        groups = list(by_prompt.values())
        lengths = [len(self._requests[group[0]].prompt_ids) for group in groups]
        for batch in padded_batches(lengths):
            self._run_prompts([groups[i] for i in batch])

    def _run_prompts(self, groups: list[list[int]]) -> None:
        """Fills a row for each request of `groups`, each of which holds requests with one prompt."""
        prompts = [self._requests[group[0]].prompt_ids for group in groups]
        members = [request for group in groups for request in group]
        rows = slice(self._active, self._active + len(members))
        for row, request in enumerate(members, start=rows.start):
            self._rows[row] = self._row(request)
        self._active = rows.stop

        ids = pad(prompts)
        source = self._tensor(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
        step = PromptPass(
            self._decoder.geometry,
            self._ropes,
            attention=self._decoder.attention,
            num_sequences=len(groups),
            length=ids.shape[1],
            store=lambda layer, keys, values: self._cache.fill(layer, rows, source, keys, values),
        )
        hidden = self._decoder.forward(ids.flatten().to(self._decoder.device), step)
        last = self._tensor(np.array([i * ids.shape[1] + len(prompt) - 1 for i, prompt in enumerate(prompts)]))
        if self._decoder.moe_layers:
            routes = step.recorded_routes().reshape(*ids.shape, len(self._decoder.moe_layers), -1)
            for group, prompt, taken in zip(groups, prompts, routes, strict=True):
                for request in group:
                    self._routes.append(np.full(len(prompt), request), taken[: len(prompt)])
        self._sample(rows, self._decoder.logits(hidden[last])[source])

    def _row(self, request: int) -> tuple[float, ...]:
        """The `_ROW` of a request whose prompt is in the cache and that has no token yet."""
        r, s = self._requests[request], self._requests[request].sampling
        stop_set = self._stop_set[s.stop_token_ids]
        return (request, 0, len(r.prompt_ids), 0, s.max_new_tokens, r.seed, s.temperature, s.top_p, s.top_k, stop_set)

    def _step(self) -> None:
        """One token for each row."""
        rows = self._rows[: self._active]
        columns = int(rows["length"].max()) + 1
        step = DecodePass(
            self._decoder.geometry,
            self._ropes,
            attention=self._decoder.attention,
            cache=self._cache,
            positions=self._tensor(rows["length"]),
            num_columns=columns,
        )
        hidden = self._decoder.forward(self._tensor(rows["token"]), step)
        rows["length"] += 1
        if self._decoder.moe_layers:
            self._routes.append(rows["request"].copy(), step.recorded_routes())
        self._sample(slice(0, self._active), self._decoder.logits(hidden))

    def _sample(self, part: slice, logits: torch.Tensor) -> None:
        """Gives the rows of `part` their next token, and ends those that are done."""
        rows = self._rows[part]
        uniforms = uniform(rows["seed"], rows["produced"].astype(np.uint64))
        drawn = sample(logits, rows["temperature"], rows["top_k"], rows["top_p"], uniforms, self._decoder.log_softmax)
        tokens, log_probs = (x.cpu().numpy() for x in drawn)
        owners = rows["request"].copy()
        if not np.isfinite(log_probs).all():
            request = self._requests[owners[~np.isfinite(log_probs)][0]].request_id
            raise NonFiniteLogitsError(f"the logits of request {request} are not finite: look at the model's weights")
        self._tokens.append(owners, tokens.astype(np.int32))
        self._log_probs.append(owners, log_probs)
        rows["token"] = tokens
        rows["produced"] += 1

        stopped = self._stops[rows["stop_set"], tokens]
        ended = stopped | (rows["produced"] == rows["limit"])
        for i in np.flatnonzero(ended):
            self._finish_reasons[owners[i]] = "stop" if stopped[i] else "length"
        self._drop(part.start + np.flatnonzero(ended))

    def _drop(self, ended: np.ndarray) -> None:
        """Frees these rows and moves the last ones into the gaps."""
        if not len(ended):
            return
        keep = self._active - len(ended)
        gaps = ended[ended < keep]
        if len(gaps):
            movers = np.setdiff1d(np.arange(keep, self._active), ended)
            columns = int(self._rows["length"][movers].max())
            self._rows[gaps] = self._rows[movers]
            self._cache.move(self._tensor(movers), self._tensor(gaps), columns)
        self._active = keep

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        # a copy: the rows change while the device may still read
        return torch.from_numpy(values.copy()).to(self._decoder.device)
