"""Weights into a running SGLang server, through its update endpoints.

Its processes read each bucket out of the pusher's device memory (see loader.py for what they do with it).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_core.device import current_device
from miles_core.rollout.sglang.client import Refused, post
from miles_core.rollout.sglang.loader import LOADER, REFRESH, header
from miles_core.weight_sync.broadcast import GROUP
from miles_core.weight_sync.bucket import WeightSyncError
from miles_core.weight_sync.handles import shared_handle
from miles_core.weight_sync.layout import Layout


def make_handle(action: str, layout: Layout, flat: Tensor, *, first: bool, last: bool) -> str:
    """A bucket for one process of a server; see `MakeHandle`."""
    return shared_handle(header(action, layout, first=first, last=last), flat)


def pause(url: str) -> None:
    """Requests in flight go back into the server's queue, and start over with the new weights."""
    post(url, "/pause_generation", {"mode": "retract"})


def resume(url: str) -> None:
    # By default the server would also give its cached memory back to the driver, which takes longer than the push.
    post(url, "/continue_generation", {"torch_empty_cache": False})


def load(url: str, handles: Sequence[str], version: int | None) -> None:
    """One bucket into the model; `version` with the last one, which also empties the prefix cache."""
    _update(url, "/update_weights_from_tensor", {"serialized_named_tensors": handles, "load_format": LOADER}, version)


def read(url: str, handles: Sequence[str]) -> None:
    """What the model holds, into the buffer."""
    load(url, handles, None)


def refresh(url: str, num_ranks: int) -> None:
    """Renews what the model derived from its weights; loads by `load` do so by themselves."""
    layout = Layout((), 0)
    nothing = torch.zeros(1, dtype=torch.uint8, device=current_device())
    load(url, [make_handle(REFRESH, layout, nothing, first=False, last=True) for _ in range(num_ranks)], None)


def join_group(url: str, address: str, port: int, first_rank: int, world_size: int, backend: str) -> None:
    """The server's processes as ranks `first_rank` and on of a group for broadcasts."""
    body = {
        "master_address": address, "master_port": port, "rank_offset": first_rank, "world_size": world_size,
        "group_name": GROUP, "backend": backend,
    }  # fmt: skip
    _checked(url, "/init_weights_update_group", body)


def leave_group(url: str) -> None:
    _checked(url, "/destroy_weights_update_group", {"group_name": GROUP})


def receive(url: str, layout: Layout, version: int | None) -> None:
    """One bucket that rank 0 of the group broadcasts meanwhile."""
    body = {
        "names": [spec.name for spec in layout.specs],
        "dtypes": [spec.dtype for spec in layout.specs],
        "shapes": [spec.shape for spec in layout.specs],
        "group_name": GROUP,
        "load_format": "flattened_bucket",
    }
    _update(url, "/update_weights_from_distributed", body, version)


def _update(url: str, path: str, body: Mapping[str, Any], version: int | None) -> None:
    last = {"flush_cache": version is not None, "weight_version": None if version is None else str(version)}
    _checked(url, path, {**body, **last, "abort_all_requests": False})


def _checked(url: str, path: str, body: Mapping[str, Any]) -> None:
    """Raises WeightSyncError with the server's own words where it says no."""
    try:
        answer = post(url, path, dict(body))
    except Refused as error:
        raise WeightSyncError(f"SGLang rejected {path}: {error}") from error
    if not answer.get("success"):
        raise WeightSyncError(f"SGLang rejected {path}: {answer.get('message')}")


def release_memory(url: str, tags: Sequence[str]) -> None:
    """Gives the memory of "kv_cache" and "weights" back to the device; the server must be idle."""
    post(url, "/release_memory_occupation", {"tags": tags})


def resume_memory(url: str, tags: Sequence[str]) -> None:
    """Takes it again, at the same addresses; what was in it is lost."""
    post(url, "/resume_memory_occupation", {"tags": tags})
