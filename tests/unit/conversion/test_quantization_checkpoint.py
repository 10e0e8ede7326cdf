"""Whole folders: our own reading, transformers' and compressed-tensors', accounts and faults."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from conversion.mapping import ConversionError
from conversion.quantization.checkpoint import quantize_folder, quantized_in_folder
from conversion.quantization.codec import codec_for, codec_from_config
from conversion.quantization.dequantized import DequantizedFolder, open_checkpoint
from conversion.quantization.formats import QuantizationError
from conversion.quantization.policy import quantized_names
from conversion.safetensors_io import CheckpointError, SafetensorsFolder, SafetensorsWriter

EXPERTS = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE in bf16, in several shards."""
    folder = tmp_path_factory.mktemp("quantization") / "source"
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="500KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "MANIFEST.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path) -> dict[str, Path]:
    """The source in every format."""
    folders = {format: source.parent / format for format in ("fp8", "int4", "mxfp8", "nvfp4")}
    for format, folder in folders.items():
        quantize_folder(source, folder, format, 32)
    return folders


@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp8", "nvfp4"])
def test_folder_holds_exactly_the_codecs_tensors(source: Path, quantized: dict[str, Path], format: str) -> None:
    codec = codec_for(format, 32)
    assert codec is not None
    config = json.loads((quantized[format] / "config.json").read_text())
    recognised = codec_from_config(config["quantization_config"])
    assert recognised is not None and recognised.spec == codec.spec
    with SafetensorsFolder(source) as before, SafetensorsFolder(quantized[format]) as after:
        names = quantized_names({name: before.spec(name).shape for name in before.names}, codec.spec.format)
        expected: dict[str, torch.Tensor] = {}
        for name in before.names:
            fused = codec.shares_scale_with(name)
            other = before.read(fused) if fused else None
            expected |= codec.encode(name, before.read(name), other) if name in names else {name: before.read(name)}
        assert set(after.names) == expected.keys()
        for name, tensor in expected.items():
            stored = after.read(name)
            assert stored.dtype == tensor.dtype and torch.equal(
                stored.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            )
    assert quantized_in_folder(quantized[format]) == names and quantized_in_folder(source) == frozenset()
    assert (quantized[format] / "tokenizer.json").exists() and not (quantized[format] / "MANIFEST.json").exists()
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp8", "nvfp4"])
def test_folder_reads_as_if_never_quantized(source: Path, quantized: dict[str, Path], format: str) -> None:
    with SafetensorsFolder(source) as before, open_checkpoint(quantized[format]) as after:
        assert isinstance(after, DequantizedFolder)
        assert set(after.names) == set(before.names) and after.total_bytes == before.total_bytes
        for name in before.names:
            tensor, original = after.read(name), before.read(name)
            spec, original_spec = after.spec(name), before.spec(name)
            assert (spec.shape, spec.dtype) == (original_spec.shape, original_spec.dtype)
            assert tensor.shape == original.shape and tensor.dtype == original.dtype
            tolerance = {"fp8": 0.07, "mxfp8": 0.07, "int4": 0.15, "nvfp4": 0.2}[format]
            error = (tensor.float() - original.float()).norm() / original.float().norm()
            assert error < tolerance if name in after.quantized else error == 0
        with pytest.raises(CheckpointError, match="no tensor nowhere"):
            after.spec("nowhere")


@pytest.mark.parametrize(
    ("format", "quantization_config"),
    [
        ("int4", CompressedTensorsConfig(dequantize=True)),
        ("fp8", FineGrainedFP8Config(dequantize=True)),
    ],
)
def test_transformers_loads_the_same_weights(quantized: dict[str, Path], format: str, quantization_config) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(
        quantized[format], dtype=torch.bfloat16, output_loading_info=True, quantization_config=quantization_config
    )
    assert not any(info.values())
    theirs = dict(model.state_dict())
    with open_checkpoint(quantized[format]) as ours:
        for layer in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
            projections = {
                part: [ours.read(f"{layer}.{expert}.{part}_proj.weight") for expert in range(EXPERTS)]
                for part in ("gate", "up", "down")
            }
            gate_up = torch.cat([torch.stack(projections["gate"]), torch.stack(projections["up"])], dim=1)
            assert torch.equal(theirs.pop(f"{layer}.gate_up_proj"), gate_up)
            assert torch.equal(theirs.pop(f"{layer}.down_proj"), torch.stack(projections["down"]))
        for name, tensor in theirs.items():
            assert torch.equal(tensor, ours.read(name)), name
    assert model(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("format", "stored_bytes_a_weight"),
    [("fp8", 1 + 4 / 128**2), ("int4", 0.5 + 2 / 32), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)],
)
def test_account(source: Path, tmp_path: Path, format: str, stored_bytes_a_weight: float) -> None:
    steps: list[tuple[int, int, str]] = []
    account = quantize_folder(source, tmp_path / "out", format, 32, lambda *step: steps.append(step))
    with SafetensorsFolder(source) as before:
        names = quantized_names({name: before.spec(name).shape for name in before.names}, format)  # type: ignore[arg-type]
        inside = sum(before.spec(name).nbytes for name in names)
        total = before.total_bytes
    constants = {"int4": 16, "nvfp4": 4}.get(format, 0) * len(names)  # shapes, tensor scales
    after = total - inside + inside / 2 * stored_bytes_a_weight + constants
    assert account == {
        "format": format,
        "tensors": 2 * (3 * EXPERTS + 9) + 3,
        "quantized": 2 * 3 * EXPERTS + (8 if format in ("fp8", "mxfp8") else 0),
        "kept": account["tensors"] - account["quantized"],
        "bytes_before": total,
        "bytes_after": after,
        "ratio": round(total / after, 3),
    }
    assert len(steps) == account["tensors"] and steps[-1][:2] == (total, total)


def test_none_is_the_same_files(source: Path, tmp_path: Path) -> None:
    account = quantize_folder(source, tmp_path / "out", "none", 128)
    assert account["kept"] == account["tensors"] and account["ratio"] == 1.0
    files = {path.name for path in source.iterdir()} - {"MANIFEST.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    shard = next(name for name in sorted(files) if name.endswith(".safetensors"))
    assert os.path.samefile(source / shard, tmp_path / "out" / shard)


def test_fp8_source_is_decoded_first(quantized: dict[str, Path], tmp_path: Path) -> None:
    """As a bf16 trainer reads it: the initial rollout weights equal those of the first push."""
    account = quantize_folder(quantized["fp8"], tmp_path / "none", "none", 128)
    assert account["quantized"] == 0 and "quantization_config" not in (tmp_path / "none/config.json").read_text()
    quantize_folder(quantized["fp8"], tmp_path / "fp8", "fp8", 128)
    quantize_folder(tmp_path / "none", tmp_path / "fp8-of-none", "fp8", 128)
    with open_checkpoint(tmp_path / "none") as decoded, open_checkpoint(quantized["fp8"]) as origin:
        assert all(torch.equal(decoded.read(name), origin.read(name)) for name in origin.names)
    with SafetensorsFolder(tmp_path / "fp8") as one, SafetensorsFolder(tmp_path / "fp8-of-none") as other:
        assert set(one.names) == set(other.names)
        assert all(torch.equal(one.read(n).float(), other.read(n).float()) for n in one.names)


def write(folder: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **config}))
    with SafetensorsWriter(folder) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return folder


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"model.layers.0.mlp.experts.0.up_proj.weight": torch.full((8, 32), torch.nan)}, QuantizationError, "NaN"),
        ({"model.norm.weight": torch.tensor([1.0, torch.inf])}, ConversionError, "model.norm.weight holds"),
        ({"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(8, 40)}, QuantizationError, "quantize.group_size"),
        ({"model.layers.0.odd.weight": torch.ones(8, 32)}, QuantizationError, "model.layers.0.odd.weight"),
    ],
)
def test_fault_leaves_no_folder_that_looks_complete(tmp_path: Path, tensors, error: type, words: str) -> None:
    source = write(tmp_path / "source", {"lm_head.weight": torch.ones(8, 32), **tensors})
    with pytest.raises(error, match=words):
        quantize_folder(source, tmp_path / "out", "int4", 32)
    with pytest.raises(CheckpointError):
        SafetensorsFolder(tmp_path / "out")


@pytest.mark.parametrize("format", ["none", "int4"])
def test_existing_weights_are_not_overwritten(source: Path, tmp_path: Path, format: str) -> None:
    there = write(tmp_path / "out", {"model.norm.weight": torch.ones(2)})
    with pytest.raises(FileExistsError, match="already holds weights"):
        quantize_folder(source, there, format, 32)


def test_weight_without_its_scale_is_found(tmp_path: Path) -> None:
    codec = codec_for("fp8", 0)
    assert codec is not None
    name = "model.layers.0.mlp.up_proj.weight"
    stored = dict(codec.encode(name, torch.ones(8, 8)))
    del stored[name]
    folder = write(tmp_path / "broken", stored, quantization_config=codec.hf_config())
    with pytest.raises(QuantizationError, match=re.escape(name)):
        open_checkpoint(folder)
