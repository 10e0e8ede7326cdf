"""Pushes to an SGLang server: every way, what the server then holds, and what must not pass."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from miles_core.rollout.engine import GenerateRequest, SamplingParams, WeightsNeededError
from miles_core.rollout.sglang.client import post
from miles_core.rollout.sglang.engine import SglangEngine
from miles_core.rollout.sglang.receiver import not_kept
from miles_core.rollout.sglang.weights import make_handle
from miles_core.weight_sync.broadcast import BroadcastSender
from miles_core.weight_sync.bucket import WeightSyncError, bucketize
from miles_core.weight_sync.local import local_receiver
from miles_core.weight_sync.shared import SharedMemorySender

LOST = "model.layers.1.mlp.experts.3.up_proj.weight"
MTP = "model.layers.2.eh_proj.weight"


@pytest.fixture(autouse=True)
def shared_between_processes():
    """CPU tensors cross to a process that is no child of this one by the name of their file. GPUs need nothing."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    leave_groups()
    torch.multiprocessing.set_sharing_strategy(before)


def tensors_of(model: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator) for name, t in load_file(model / "model.safetensors").items()
    }


def by_host(engine: SglangEngine):
    return lambda tensors, version, verify: engine.update_weights(list(bucketize(tensors.items(), 20_000)), version)


def by_sender(engine: SglangEngine, sender):
    receivers = [local_receiver(engine.push_receiver())]
    return lambda tensors, version, verify: sender.push(tensors.items(), receivers, version, verify=verify)


def by_broadcast(engine: SglangEngine):
    sender = BroadcastSender(20_000, "127.0.0.1")
    GROUPS.append(sender)
    return by_sender(engine, sender)


GROUPS: list[BroadcastSender] = []


def leave_groups() -> None:
    while GROUPS:
        GROUPS.pop().close()


WAYS = {
    "host": by_host,
    "ipc": lambda engine: by_sender(engine, SharedMemorySender(20_000, make_handle)),
    "broadcast": by_broadcast,
}


@pytest.fixture(scope="module")
def engine(start) -> SglangEngine:
    """One for all tests: a complete push makes good whatever an earlier one has left."""
    return start(max_restarts=10)


def log_since(engine: SglangEngine, start: int) -> list[str]:
    """Calls to the server that concern weights."""
    return [path for path in post(engine._server.url, "/log", {})[start:] if path != "/log"]


def ask(engine: SglangEngine) -> list[int]:
    request = GenerateRequest("r", np.array([1], np.int32), SamplingParams(max_new_tokens=2), seed=0)
    return engine.generate([request])[0].weight_versions.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_server_holds_what_was_pushed_and_says_so(way: str, engine, model: Path) -> None:
    push = WAYS[way](engine)
    for version in (1, 2, 3):
        report = push(tensors_of(model, version), version, verify=version != 2)
        assert ask(engine) == [version, version]
        if way != "host":
            kept = [name for name in tensors_of(model, 0) if "layers.2." not in name]
            assert report.verified == (0 if version == 2 else len(kept))
            assert report.buckets > 5 and report.nbytes == sum(t.nbytes for t in tensors_of(model, 0).values())
            assert report.metrics()["perf/weights_gbytes_per_sec"] > 0
    assert not engine.push_receiver().needed


def test_each_rank_of_a_server_takes_its_slice(start, model: Path) -> None:
    push = WAYS["ipc"](start(server_args={"tp_size": 2}))
    assert push(tensors_of(model, 1), 1, verify=True).verified > 50
    assert push(tensors_of(model, 2), 2, verify=True).verified > 50


def test_a_push_is_one_pause_around_all_of_it(engine, model: Path) -> None:
    push = WAYS["ipc"](engine)
    before = len(post(engine._server.url, "/log", {})) + 1
    buckets = push(tensors_of(model, 1), 1, verify=False).buckets
    update = "/update_weights_from_tensor"
    expected = ["/pause_generation", *[update] * buckets, "/continue_generation"]
    assert log_since(engine, before) == expected
    push(tensors_of(model, 2), 2, verify=True)
    proven = ["/pause_generation", *[update] * 2 * buckets, "/continue_generation"]
    assert log_since(engine, before + len(expected) + 1) == proven


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype"])
def test_a_push_that_does_not_fit_never_generates(way: str, change: str, engine, model: Path) -> None:
    version = engine.weight_version()
    WAYS["ipc"](engine)(tensors_of(model, 0), version, verify=False)
    tensors = tensors_of(model, 1)
    said = {
        "missing": rf"1 missing: {LOST}",
        "unknown": r"1 unknown to the engine: model\.extra",
        "shape": rf"1 of another dtype or shape: {LOST} \(float32 \(31, 32\), must be float32 \(32, 32\)\)",
        "dtype": rf"1 of another dtype or shape: {LOST} \(bfloat16",
    }[change]
    if change == "missing":
        del tensors[LOST]
    elif change == "unknown":
        tensors["model.extra"] = torch.zeros(3)
    else:
        tensors[LOST] = tensors[LOST][1:] if change == "shape" else tensors[LOST].bfloat16()
    with pytest.raises(WeightSyncError, match=said):
        WAYS[way](engine)(tensors, version + 1, verify=False)
    assert engine.weight_version() == version
    if way != "host":  # where nothing was touched
        with pytest.raises(WeightsNeededError):
            ask(engine)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_the_server_loses_is_found_before_it_generates(way: str, start, model: Path) -> None:
    engine = start()
    drop = model / "drop"
    drop.write_text(LOST)
    try:
        with pytest.raises(WeightSyncError, match=rf"1 (sent but not held|different): {LOST}"):
            WAYS[way](engine)(tensors_of(model, 1), 1, verify=True)
    finally:
        drop.unlink()
    assert log_since(engine, -2)[-1] != "/continue_generation"


def test_a_draft_must_keep_its_layers() -> None:
    names = [MTP, "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight", LOST]
    assert not_kept(names, 2, drafts=False) == set(names) - {LOST}
    assert not_kept(names, 2, drafts=True) == set(names[1:3])


@pytest.mark.slow
def test_a_server_that_dies_in_a_push_gets_it_again(engine, model: Path) -> None:
    push = WAYS["ipc"](engine)
    push(tensors_of(model, 1), 1, verify=True)
    (model / "die-in-push").touch()
    assert push(tensors_of(model, 2), 2, verify=True).lost == {0}
    with pytest.raises(WeightsNeededError):
        ask(engine)
    assert push(tensors_of(model, 2), 2, verify=True).lost == set()
    assert ask(engine) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_dies_in_a_rollout_never_answers_with_old_weights(way: str, engine, model: Path) -> None:
    version = 10 + list(WAYS).index(way)
    push = WAYS[way](engine)
    push(tensors_of(model, version), version, verify=True)
    (model / "die").touch()
    if way == "host":  # the engine has a copy
        assert ask(engine) == [version, version]
        return
    with pytest.raises(WeightsNeededError) as raised:
        ask(engine)
    assert raised.value.completions == []
    leave_groups()
    push = WAYS[way](engine)
    push(tensors_of(model, version), version, verify=True)
    assert ask(engine) == [version, version]


def test_memory_that_was_released_is_there_again_before_it_is_needed(engine, model: Path) -> None:
    WAYS["ipc"](engine)(tensors_of(model, 1), 1, verify=False)
    before = len(post(engine._server.url, "/log", {})) + 1
    receiver = engine.push_receiver()
    receiver.release_memory(["kv_cache", "weights"])
    with pytest.raises(WeightsNeededError):
        ask(engine)
    WAYS["ipc"](engine)(tensors_of(model, 1), 1, verify=True)
    assert ask(engine) == [1, 1]
    log = log_since(engine, before)
    resumed = [i for i, path in enumerate(log) if path == "/resume_memory_occupation"]
    updates = [i for i, path in enumerate(log) if path == "/update_weights_from_tensor"]
    assert resumed[0] < updates[0] and updates[-1] < resumed[1] < log.index("/continue_generation")
