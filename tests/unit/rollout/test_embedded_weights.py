"""The embedded engine's weights: exact accounting on load and on push, digests, quantized folders."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_models import write_model

from conversion.mapping import ConversionError
from conversion.quantization.checkpoint import quantize_folder
from conversion.quantization.codec import codec_from_config
from conversion.quantization.dequantized import DequantizedFolder
from conversion.random_model import make_random_model
from conversion.safetensors_io import CheckpointError, SafetensorsFolder, SafetensorsWriter, copy_side_files
from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.rollout.embedded.generation import NonFiniteLogitsError
from miles_core.rollout.engine import GenerateRequest, SamplingParams
from miles_core.weight_sync.bucket import WeightBucket, WeightSyncError, bucketize, tensor_digest

Named = dict[str, torch.Tensor]
SEQUENCE = np.arange(4, 24, dtype=np.int32)
ROUTER, EXPERT = "model.layers.1.mlp.gate.weight", "model.layers.2.mlp.experts.3.down_proj.weight"


def read(folder: Path) -> Named:
    with SafetensorsFolder(folder) as opened:
        return {name: opened.read(name) for name in opened.names}


def buckets(tensors: Named) -> list[WeightBucket]:
    packed = list(bucketize(tensors.items(), 10_000))
    for bucket in packed:
        bucket.data.setflags(write=False)  # as they come out of shared memory
    return packed


def digests(tensors: Named) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    paths = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    for seed, path in enumerate(paths):
        write_model("glm4_moe", path, seed)
    return paths


@pytest.mark.parametrize(
    "family", ["glm4_moe", "deepseek_v3", "gemma3", "minimax_m2", "qwen2"]
)  # every kind of fused or derived storage
def test_a_push_equals_loading_from_disk(family: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_model(family, old, seed=0)
    write_model(family, new, seed=1)
    engine, fresh = EmbeddedEngine(old), EmbeddedEngine(new)
    assert (engine.weight_version(), engine.weight_digests()) == (0, digests(read(old)))
    before, expected = engine.score([SEQUENCE])[0], fresh.score([SEQUENCE])[0]
    assert np.abs(before - expected).max() > 0.1

    engine.update_weights(buckets(read(new)), version=7)
    assert engine.weight_version() == 7
    assert engine.weight_digests() == fresh.weight_digests() == digests(read(new))
    np.testing.assert_array_equal(engine.score([SEQUENCE])[0], expected)
    answer = engine.generate([GenerateRequest("0", SEQUENCE, SamplingParams(max_new_tokens=3), 0)])[0]
    assert set(answer.weight_versions.tolist()) == {7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {("renamed" if n == EXPERT else n): x for n, x in t.items()}, f"missing: {EXPERT}.*renamed"),
        (lambda t: {n: x for n, x in t.items() if n != EXPERT}, f"1 missing: {EXPERT}"),
        (lambda t: t | {"model.layers.0.surprise": torch.zeros(1)}, "1 unknown to the engine: model.layers.0.surprise"),
        (lambda t: t | {EXPERT: t[EXPERT].T}, rf"another dtype or shape: {EXPERT} \(float32 \(16, 32\), must be"),
        (lambda t: t | {ROUTER: t[ROUTER].bfloat16()}, rf"another dtype or shape: {ROUTER} \(bfloat16"),
    ],
    ids=["renamed", "missing", "unknown", "shape", "dtype"],
)
def test_a_push_that_does_not_fit_changes_nothing(
    folders: tuple[Path, Path], change: Callable[[Named], Named], message: str
) -> None:
    old, new = folders
    engine = EmbeddedEngine(old)
    before = engine.score([SEQUENCE])[0]
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights(buckets(change(read(new))), version=1)
    assert (engine.weight_version(), engine.weight_digests()) == (0, digests(read(old)))
    np.testing.assert_array_equal(engine.score([SEQUENCE])[0], before)


def test_a_tensor_given_twice_is_refused(folders: tuple[Path, Path]) -> None:
    sent = read(folders[1])
    with pytest.raises(WeightSyncError, match=f"1 given more than once: {ROUTER}"):
        EmbeddedEngine(folders[0]).update_weights(buckets(sent) + buckets({ROUTER: sent[ROUTER]}), version=1)


def test_weights_that_give_nan_stop_generation(folders: tuple[Path, Path]) -> None:
    engine = EmbeddedEngine(folders[0])
    engine.update_weights(buckets(read(folders[0]) | {ROUTER: torch.full((8, 32), torch.nan)}), version=1)
    with pytest.raises(NonFiniteLogitsError, match="request 17"):
        engine.generate([GenerateRequest("17", SEQUENCE, SamplingParams(max_new_tokens=4), 0)])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if n != EXPERT}, ConversionError, EXPERT),
        (lambda t: t | {"model.layers.0.surprise": torch.zeros(1)}, ConversionError, "model.layers.0.surprise"),
        (lambda t: t | {EXPERT: t[EXPERT][:8]}, CheckpointError, rf"{EXPERT} \(8, 16\), not \(32, 16\)"),
        (lambda t: t | {"model.norm.weight": torch.ones(1)}, CheckpointError, r"model.norm.weight \(1,\), not \(32,\)"),
    ],
    ids=["missing", "unknown", "shape", "broadcastable shape"],
)
def test_a_folder_that_does_not_fit_is_refused(
    folders: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[Named], Named],
    error: type[Exception],
    message: str,
) -> None:
    write_folder(tmp_path, folders[0], change(read(folders[0])))
    with pytest.raises(error, match=message):
        EmbeddedEngine(tmp_path)


def write_folder(folder: Path, like: Path, tensors: Named) -> None:
    copy_side_files(like, folder)
    with SafetensorsWriter(folder) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.contiguous())


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decoder layers (one dense, one MoE) and an MTP layer, with copies of embedding and head."""
    folder = tmp_path_factory.mktemp("mtp")
    make_random_model(
        folder,
        num_layers=2,
        num_dense_layers=1,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        num_experts=4,
        top_k=2,
        moe_ffn_hidden_size=32,
        num_mtp_layers=1,
        max_position=64,
        seed=0,
    )
    return folder


def test_mtp_layers_are_held_and_pushed_but_not_run(mtp_folder: Path) -> None:
    engine = EmbeddedEngine(mtp_folder)
    tensors = read(mtp_folder)
    mtp = [name for name in tensors if name.startswith("model.layers.2.")]
    assert len(mtp) > 10
    assert engine.weight_digests() == digests(tensors)
    before = engine.score([SEQUENCE])[0]
    doubled = tensors | {name: tensors[name] * 2 for name in mtp}
    engine.update_weights(buckets(doubled), version=1)
    assert engine.weight_digests() == digests(doubled)
    np.testing.assert_array_equal(engine.score([SEQUENCE])[0], before)
    with pytest.raises(WeightSyncError, match=f"{len(mtp)} missing"):
        engine.update_weights(buckets({n: x for n, x in tensors.items() if n not in mtp}), version=2)


@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_quantized_folders_are_decoded_and_pushed_encoded(mtp_folder: Path, tmp_path: Path, format: str) -> None:
    quantized, decoded = tmp_path / "quantized", tmp_path / "decoded"
    quantize_folder(mtp_folder, quantized, format, group_size=32)
    config = json.loads((quantized / "config.json").read_text())
    codec = codec_from_config(config.pop("quantization_config"))
    assert codec is not None
    opened = DequantizedFolder(quantized, codec, torch.float32)
    write_folder(decoded, quantized, {name: opened.read(name) for name in opened.names})
    (decoded / "config.json").write_text(json.dumps(config))

    engine = EmbeddedEngine(quantized)
    expected = EmbeddedEngine(decoded).score([SEQUENCE])[0]
    np.testing.assert_array_equal(engine.score([SEQUENCE])[0], expected)
    assert np.abs(EmbeddedEngine(mtp_folder).score([SEQUENCE])[0] - expected).max() > 1e-4
    assert engine.weight_digests() == digests(read(quantized))

    sent: Named = {}
    for name, tensor in read(decoded).items():
        scaled = tensor * 0.5
        sent |= dict(codec.encode(name, scaled)) if name in opened.quantized else {name: scaled}
    engine.update_weights(buckets(sent), version=1)
    assert engine.weight_digests() == digests(sent)
    assert np.abs(engine.score([SEQUENCE])[0] - expected).max() > 1e-3
