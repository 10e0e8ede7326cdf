"""Inspecting, comparing and verifying checkpoints of both kinds."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import Tensors, megatron_tensors, read_tensors, write_checkpoint, write_folder

from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.inspect import diff_checkpoints, inspect_checkpoint, kind_of, verify_checkpoint
from conversion.quantization.checkpoint import quantize_folder
from conversion.safetensors_header import CheckpointError

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `hf` and the `torch_dist` that was made of it."""
    root = tmp_path_factory.mktemp("moe")
    hf_to_torch_dist(write_checkpoint(root / "hf", "glm4-moe"), root / "torch_dist")
    return root


def changed(source: Path, out: Path, changes: Tensors, without: tuple[str, ...] = ()) -> Path:
    tensors = {name: tensor for name, tensor in (read_tensors(source) | changes).items() if name not in without}
    write_folder(out, json.loads((source / "config.json").read_text()), tensors)
    return out


def test_inspect_lists_every_tensor_with_its_norm(moe: Path) -> None:
    for kind, folder, tensors in (
        ("Hugging Face", moe / "hf", read_tensors(moe / "hf")),
        ("torch_dist", moe / "torch_dist", megatron_tensors(moe / "hf")[1]),
        ("torch_dist", moe / "torch_dist/release", megatron_tensors(moe / "hf")[1]),
    ):
        found = inspect_checkpoint(folder)
        assert (found.kind, found.folder) == (kind, folder)
        assert {t.name: t.shape for t in found.tensors} == {name: tuple(t.shape) for name, t in tensors.items()}
        for stats in found.tensors:
            tensor = tensors[stats.name]
            assert stats.norm == pytest.approx(float(tensor.double().square().sum().sqrt()), rel=1e-12)
            assert (stats.dtype, stats.nbytes) == (str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        assert found.parameters == sum(t.numel() for t in tensors.values())
        assert found.nbytes == sum(t.nbytes for t in tensors.values())
        assert sum(found.dtypes.values()) == len(tensors) and set(found.dtypes) == {"bfloat16", "float32"}
        assert found.nonfinite == ()


def test_inspect_counts_non_finite_values_in_every_dtype(tmp_path: Path) -> None:
    inf, nan = math.inf, math.nan
    tensors = {
        "float32": torch.tensor([nan, 1.0, -inf, inf]),
        "bfloat16": torch.tensor([nan, nan, 3.0, 4.0], dtype=torch.bfloat16),
        "float8_e4m3fn": torch.tensor([nan, 3.0, 0.0, 4.0]).to(torch.float8_e4m3fn),
        "int32": torch.tensor([3, 4], dtype=torch.int32),
        "float64": torch.tensor([3.0, 4.0], dtype=torch.float64),
        "float16": torch.empty(0, 3, dtype=torch.float16),
    }
    write_folder(tmp_path / "hf", {}, tensors)
    found = {t.name: t for t in inspect_checkpoint(tmp_path / "hf").tensors}
    assert {name: (t.nan, t.inf) for name, t in found.items()} == {
        "float32": (1, 2),
        "bfloat16": (2, 0),
        "float8_e4m3fn": (1, 0),
        "int32": (0, 0),
        "float64": (0, 0),
        "float16": (0, 0),
    }
    assert found["int32"].norm == found["float64"].norm == 5.0
    assert math.isnan(found["float32"].norm) and found["float16"].norm == 0.0


def test_diff_of_equal_checkpoints_is_empty(moe: Path, tmp_path: Path) -> None:
    again = changed(moe / "hf", tmp_path / "again", {})
    hf_to_torch_dist(again, tmp_path / "torch_dist")
    for left, right in ((moe / "hf", again), (moe / "torch_dist", tmp_path / "torch_dist")):
        diff = diff_checkpoints(left, right)
        assert (diff.exit_code, diff.different) == (0, ())
        assert [row.name for row in diff.rows] == [tensor.name for tensor in inspect_checkpoint(left).tensors]
        assert all(row.left == row.right and row.max_abs_diff == 0.0 for row in diff.rows)


def test_diff_tells_values_dtypes_shapes_and_absence_apart(moe: Path, tmp_path: Path) -> None:
    tensors = read_tensors(moe / "hf")
    value = tensors[NORM].clone()
    value[5] += 2.0
    negative_zero, zero = torch.tensor([-0.0]), torch.tensor([0.0])
    left = changed(moe / "hf", tmp_path / "left", {"zero": zero})
    changes = {
        NORM: value,
        "lm_head.weight": tensors["lm_head.weight"].float(),
        DOWN: tensors[DOWN][:10],
        "more": torch.ones(2),
        "zero": negative_zero,
    }
    right = changed(moe / "hf", tmp_path / "right", changes, without=("model.embed_tokens.weight",))
    diff = diff_checkpoints(left, right)
    found = {row.name: row for row in diff.different}
    assert diff.exit_code == 1
    assert {name: (r.left is None, r.right is None, r.max_abs_diff) for name, r in found.items()} == {
        NORM: (False, False, float((value - tensors[NORM]).abs().max())),
        "lm_head.weight": (False, False, 0.0),
        DOWN: (False, False, None),
        "more": (True, False, None),
        "zero": (False, False, 0.0),
        "model.embed_tokens.weight": (False, True, None),
    }
    assert found[DOWN].right is not None and found[DOWN].right.shape == (10, 24)
    assert diff.rows[-1].name == "more"


def test_diff_of_two_kinds_is_refused(moe: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a Hugging Face checkpoint and .* a torch_dist one: convert one"):
        diff_checkpoints(moe / "hf", moe / "torch_dist")
    with pytest.raises(CheckpointError, match=r"is no checkpoint: a Hugging Face folder has config.json"):
        kind_of(tmp_path)


def test_verify_accepts_whole_checkpoints(moe: Path, tmp_path: Path) -> None:
    quantize_folder(moe / "hf", tmp_path / "fp8", "fp8", 0)
    for folder in (moe / "hf", moe / "torch_dist", moe / "torch_dist/release", tmp_path / "fp8"):
        found = verify_checkpoint(folder)
        assert (found.faults, found.exit_code) == ((), 0)
        assert found.tensors == len(inspect_checkpoint(folder).tensors)


def test_verify_names_the_faults_of_hugging_face_folders(moe: Path, tmp_path: Path) -> None:
    bad = read_tensors(moe / "hf")[NORM].clone()
    bad[0] = math.nan
    found = verify_checkpoint(changed(moe / "hf", tmp_path / "bad", {NORM: bad}, without=(DOWN,)))
    assert found.exit_code == 1
    assert found.faults == (
        f"1 tensors missing from the checkpoint: {DOWN}",
        f"tensor {NORM} holds 1 NaN and 0 infinite values",
    )
    (shape,) = verify_checkpoint(changed(moe / "hf", tmp_path / "shape", {DOWN: torch.zeros(64, 25)})).faults
    assert shape == f"tensor {DOWN} has shape [64, 25], but config.json implies [64, 24]"
    (tmp_path / "shape/config.json").write_text('{"architectures": ["NewForCausalLM"]}')
    (unknown,) = verify_checkpoint(tmp_path / "shape").faults
    assert "no model family for NewForCausalLM" in unknown
    shard = next((tmp_path / "bad").glob("model-00001*"))
    os.truncate(shard, 1000)
    (truncated,) = verify_checkpoint(tmp_path / "bad").faults
    assert f"{shard.name} is truncated" in truncated


def test_verify_names_the_faults_of_torch_dist_folders(moe: Path, tmp_path: Path) -> None:
    hf_to_torch_dist(moe / "hf", tmp_path / "out")
    config = tmp_path / "out/hf/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_routed_experts": 15, "hidden_size": 60}))
    (fault,) = verify_checkpoint(tmp_path / "out").faults
    assert "missing from the checkpoint: decoder.layers.1.mlp.experts.local_experts.12.linear_fc1.weight" in fault
    assert "decoder.final_layernorm.weight [64] instead of [60]" in fault
    os.truncate(tmp_path / "out/release/__0_0.distcp", 1000)
    (truncated,) = verify_checkpoint(tmp_path / "out").faults
    assert "__0_0.distcp is truncated" in truncated
