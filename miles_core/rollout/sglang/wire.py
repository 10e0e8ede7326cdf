"""SGLang's HTTP format: our requests to JSON, its JSON to our completions."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.rollout.engine import Completion, GenerateRequest


class WireError(ValueError):
    """An answer that does not say what it must."""


def generate_payload(
    requests: Sequence[GenerateRequest], *, routed_experts: bool, deterministic: bool
) -> dict[str, Any]:
    """Body of POST /generate for several requests at once.

    Stop tokens stay in the output and special tokens in nothing but ids, since training needs exactly what was sampled.
    Seeds reach the server only in its deterministic mode; elsewhere it ignores them.
    """
    return {
        "input_ids": [request.prompt_ids.tolist() for request in requests],
        "sampling_params": [_sampling_params(request, deterministic) for request in requests],
        "rid": [request.request_id for request in requests],
        "return_logprob": True,
        "return_routed_experts": routed_experts,
    }


def _sampling_params(request: GenerateRequest, deterministic: bool) -> dict[str, Any]:
    s = request.sampling
    params = {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "max_new_tokens": s.max_new_tokens,
        "stop_token_ids": list(s.stop_token_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    return params | ({"sampling_seed": request.seed % 2**31} if deterministic else {})


def to_completion(
    request: GenerateRequest, answer: Mapping[str, Any], *, layers: int, top_k: int | None, default_version: int
) -> Completion:
    """One answer of /generate. `top_k` is the experts chosen per token, None for a dense model.

    Raises WireError when log-probs, ids or routes are missing or of unequal length: nothing is padded.
    """
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        raise WireError(f"request {request.request_id}: the answer holds no output_token_logprobs")
    ids = np.array([entry[1] for entry in pairs], dtype=np.int32)
    produced = meta["completion_tokens"]
    if len(ids) != produced:
        raise WireError(f"request {request.request_id}: {len(ids)} log-probs for {produced} tokens")
    version = meta.get("weight_version")
    return Completion(
        request_id=request.request_id,
        output_ids=ids,
        log_probs=np.array([entry[0] for entry in pairs], dtype=np.float32),
        finish_reason=(meta["finish_reason"] or {"type": "abort"})["type"],
        weight_versions=np.full(len(ids), int(version) if str(version).isdigit() else default_version, dtype=np.int32),
        routed_experts=None if top_k is None else _routes(request, meta, len(ids), layers, top_k),
    )


def _routes(request: GenerateRequest, meta: Mapping[str, Any], produced: int, layers: int, top_k: int) -> np.ndarray:
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise WireError(
            f"request {request.request_id}: no routed experts in the answer; the server needs "
            "enable_return_routed_experts"
        )
    flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    row = layers * top_k
    needed = len(request.prompt_ids) + produced - 1
    rows, rest = divmod(len(flat), row)
    # Ending on a stop token can give one row more, that of the stop token itself, which no later token needs.
    if rest or rows not in (needed, needed + 1):
        raise WireError(
            f"request {request.request_id}: routed experts hold {len(flat)} numbers, {needed} tokens x {layers} layers "
            f"x {top_k} experts = {needed * row} are needed"
        )
    return flat[: needed * row].reshape(needed, layers, top_k).astype(np.int16)
