"""HF -> torch_dist -> HF: bit-equal, complete or an error by name, and never half a result."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_checkpoints import Tensors, megatron_tensors, read_tensors, same_bits, write_checkpoint, write_folder
from tiny_models import TINY

from conversion.disk import DiskFullError
from conversion.families import UnknownFamilyError, geometry_from_config
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.mapping import ConversionError
from conversion.quantization.checkpoint import quantize_folder
from conversion.random_model import make_random_model
from conversion.safetensors_header import CheckpointError
from conversion.torch_dist_reader import TorchDistFolder, find_checkpoint
from conversion.torch_dist_to_hf import torch_dist_to_hf
from conversion.torch_dist_writer import TorchDistWriter


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_same_model(folder: Path, other: Path) -> None:
    """Tensors bit for bit with their number formats, and every side file."""
    ours, theirs = read_tensors(folder), read_tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same_bits(ours[name], theirs[name])] == []
    sides = [{n: raw for n, raw in contents(f).items() if "safetensors" not in n} for f in (folder, other)]
    assert sides[0] == sides[1]


@pytest.mark.parametrize("name", TINY)
def test_round_trip_is_bit_equal(tmp_path, name):
    hf = write_checkpoint(tmp_path / "hf", name)
    account = hf_to_torch_dist(hf, tmp_path / "torch_dist")
    exported = torch_dist_to_hf(tmp_path / "torch_dist", tmp_path / "torch_dist" / "hf", tmp_path / "back")
    assert_same_model(hf, tmp_path / "back")
    tensors = read_tensors(hf)
    assert account["tensors_in_source"] == len(tensors) == exported["tensors_written"]
    assert account["tensors_converted"] + account["tensors_compared_as_copies"] == len(tensors)
    assert account["warnings"] == exported["warnings"] == []
    assert exported["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


def test_round_trip_of_the_random_model_gives_the_same_files(tmp_path):
    shape = {"num_layers": 3, "num_dense_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    shape |= {"head_dim": 8, "ffn_hidden_size": 48, "num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16}
    make_random_model(tmp_path / "hf", **shape, num_mtp_layers=1, max_position=64, seed=3)
    hf_to_torch_dist(tmp_path / "hf", tmp_path / "torch_dist")
    torch_dist_to_hf(tmp_path / "torch_dist", tmp_path / "torch_dist" / "hf", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "hf")


def test_folder_holds_what_an_export_and_a_trainer_need(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe")
    hf_to_torch_dist(hf, tmp_path / "out")
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"
    assert find_checkpoint(tmp_path / "out") == tmp_path / "out/release"
    rules, expected = megatron_tensors(hf)
    folder = TorchDistFolder(tmp_path / "out")
    assert set(folder.names) == {rule.megatron for rule in rules}
    assert all(same_bits(folder.read(name), tensor) for name, tensor in expected.items())
    described = json.loads((tmp_path / "out/hf/tensors.json").read_text())["tensors"]
    assert described["model.layers.1.mlp.gate.weight"] == {"dtype": "float32", "shape": [12, 64]}
    assert described.keys() == read_tensors(hf).keys()


def test_a_quantized_source_is_decoded(tmp_path):
    """As DeepSeek-V3 is released: FP8 in blocks; what is converted equals the decoded folder."""
    hf = write_checkpoint(tmp_path / "hf", "deepseek-v3", dtype="bfloat16")
    quantize_folder(hf, tmp_path / "fp8", "fp8", 0)
    quantize_folder(tmp_path / "fp8", tmp_path / "decoded", "none", 0)
    account = hf_to_torch_dist(tmp_path / "fp8", tmp_path / "torch_dist")
    scales = [name for name in read_tensors(tmp_path / "fp8") if name.endswith("weight_scale_inv")]
    assert account["tensors_dequantized"] == len(scales) > 100
    for reference in (tmp_path / "torch_dist/hf", tmp_path / "fp8"):
        torch_dist_to_hf(tmp_path / "torch_dist", reference, tmp_path / "back")
        assert_same_model(tmp_path / "back", tmp_path / "decoded")
        shutil.rmtree(tmp_path / "back")


# MTP layers


def test_mtp_layers_are_left_out_on_request_and_counted(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe", num_nextn_predict_layers=2)
    tensors = read_tensors(hf)
    for layers, gone in ((0, ["model.layers.3", "model.layers.4"]), (1, ["model.layers.4"])):
        out = tmp_path / f"torch_dist{layers}"
        account = hf_to_torch_dist(hf, out, mtp_num_layers=layers)
        left_out = {name for name in tensors if name.startswith(tuple(f"{layer}." for layer in gone))}
        assert account["tensors_left_out"] == len(left_out) > 50
        assert account["layers_left_out"] == gone
        assert (account["mtp_converted"], account["mtp_initialised"]) == (layers, 0)
        assert f"{len(left_out)} tensors of {2 - layers} MTP layers are left out" in account["warnings"][0]
        torch_dist_to_hf(out, out / "hf", tmp_path / f"back{layers}")
        back = read_tensors(tmp_path / f"back{layers}")
        assert back.keys() == tensors.keys() - left_out
        assert all(same_bits(back[name], tensors[name]) for name in back)
        config = json.loads((tmp_path / f"back{layers}/config.json").read_text())
        assert config == json.loads((hf / "config.json").read_text()) | {"num_nextn_predict_layers": layers}


def test_mtp_layers_that_the_config_promises_and_the_checkpoint_lacks_are_not_converted(tmp_path):
    def drop_mtp(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    hf = write_checkpoint(tmp_path / "hf", "glm4-moe", num_nextn_predict_layers=1, change=drop_mtp)
    account = hf_to_torch_dist(hf, tmp_path / "out")
    assert (account["mtp_in_source"], account["mtp_converted"], account["tensors_left_out"]) == (0, 0, 0)
    assert json.loads((tmp_path / "out/hf/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_fresh_mtp_layers_are_made_and_announced(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe", num_nextn_predict_layers=1)
    account = hf_to_torch_dist(hf, tmp_path / "out", mtp_num_layers=2)
    assert (account["mtp_in_source"], account["mtp_converted"], account["mtp_initialised"]) == (1, 1, 1)
    assert "1 MTP layers are FRESHLY INITIALISED" in account["warnings"][0]
    torch_dist_to_hf(tmp_path / "out", tmp_path / "out/hf", tmp_path / "back")
    old, back = read_tensors(hf), read_tensors(tmp_path / "back")
    fresh = {name: tensor for name, tensor in back.items() if name not in old}
    assert all(same_bits(back[name], tensor) for name, tensor in old.items())
    assert {n.replace("layers.4.", "layers.3.") for n in fresh} == {n for n in old if n.startswith("model.layers.3.")}
    for name, tensor in fresh.items():
        assert tensor.dtype == old[name.replace("layers.4.", "layers.3.")].dtype
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor))
        elif name.endswith("bias"):
            assert not tensor.any()
        elif "embed_tokens" not in name and "shared_head.head" not in name:
            assert 0.015 < tensor.float().std() < 0.025
    assert same_bits(fresh["model.layers.4.embed_tokens.weight"], old["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 2


def test_a_family_without_mtp_cannot_get_any(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "llama")
    with pytest.raises(ConversionError, match=r"LlamaForCausalLM has no MTP layers; set model.mtp_num_layers = 0"):
        hf_to_torch_dist(hf, tmp_path / "out", mtp_num_layers=1)


# Completeness


def test_experts_keep_their_identity(tmp_path):
    def number_the_experts(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if ".mlp.experts." in name:
                tensor.fill_(int(name.split(".mlp.experts.")[1].split(".")[0]) + 1)

    hf = write_checkpoint(tmp_path / "hf", "glm4-moe", change=number_the_experts)
    hf_to_torch_dist(hf, tmp_path / "torch_dist")
    torch_dist_to_hf(tmp_path / "torch_dist", tmp_path / "torch_dist/hf", tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    for expert in range(12):
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensor = back[f"model.layers.2.mlp.experts.{expert}.{part}.weight"]
            assert torch.equal(tensor, torch.full_like(tensor, expert + 1))


DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def put(name: str, index: int, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[index] = value

    return change


FAULTS = {
    "missing": (lambda t: t.pop(DOWN), rf"1 tensors missing from the checkpoint: {DOWN}$"),
    "missing in the MTP layer": (
        lambda t: t.pop("model.layers.3.eh_proj.weight"),
        r"1 tensors missing from the checkpoint: model.layers.3.eh_proj.weight$",
    ),
    "extra": (
        lambda t: t.update({"model.layers.1.mlp.experts.99.foo": torch.zeros(1)}),
        r"1 tensors in the checkpoint, but no rule uses them: model.layers.1.mlp.experts.99.foo$",
    ),
    "extra layer": (
        lambda t: t.update({"model.layers.7.input_layernorm.weight": torch.zeros(64)}),
        "no rule uses them: model.layers.7.input_layernorm.weight$",
    ),
    "wrong shape": (
        lambda t: t.update({DOWN: torch.zeros(64, 25)}),
        rf"tensor {DOWN} has shape \[64, 25\], but config.json implies \[64, 24\]",
    ),
    "NaN": (put(DOWN, 5, float("nan")), f"tensor {DOWN} holds 1 NaN and 0 infinite values among 1536"),
    "infinity": (put("model.norm.weight", 0, -float("inf")), "tensor model.norm.weight holds 0 NaN and 1 infinite"),
    "another copy": (
        put("model.layers.3.shared_head.head.weight", 0, 7.0),
        "model.layers.3.shared_head.head.weight must be a copy of lm_head.weight",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_faulty_checkpoint_is_an_error_by_name_and_leaves_nothing_behind(tmp_path, case):
    change, message = FAULTS[case]
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe", change=change)
    with pytest.raises(ConversionError, match=message):
        hf_to_torch_dist(hf, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is no torch_dist checkpoint"):
        find_checkpoint(tmp_path / "out")
    assert not list(tmp_path.rglob("*.distcp"))


def test_other_bad_sources(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "llama")
    config = json.loads((hf / "config.json").read_text())
    write_folder(tmp_path / "unknown", config | {"architectures": ["NewForCausalLM"]}, read_tensors(hf))
    with pytest.raises(UnknownFamilyError, match="NewForCausalLM"):
        hf_to_torch_dist(tmp_path / "unknown", tmp_path / "out")
    shard = next(hf.glob("model-00002*"))
    os.truncate(shard, shard.stat().st_size - 2)
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        hf_to_torch_dist(hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_finished_folder_is_never_overwritten(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "llama")
    hf_to_torch_dist(hf, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(FileExistsError, match="already holds a checkpoint"):
        hf_to_torch_dist(hf, tmp_path / "out")
    with pytest.raises(FileExistsError, match="already holds weights"):
        torch_dist_to_hf(tmp_path / "out", tmp_path / "out/hf", hf)
    assert contents(tmp_path / "out") == before


def test_progress_counts_all_bytes(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe")
    for convert in (
        lambda progress: hf_to_torch_dist(hf, tmp_path / "out", progress=progress),
        lambda progress: torch_dist_to_hf(tmp_path / "out", tmp_path / "out/hf", tmp_path / "back", progress=progress),
    ):
        calls: list[tuple[int, int, str]] = []
        account = convert(lambda *call: calls.append(call))  # noqa: B023
        assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
        assert {total for _, total, _ in calls} == {calls[-1][0]} == {account["bytes"]}
        assert len({name for _, _, name in calls}) == account["megatron_tensors"]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    hf = write_checkpoint(tmp_path / "hf", "llama")
    hf_to_torch_dist(hf, tmp_path / "torch_dist")
    size = sum(tensor.nbytes for tensor in read_tensors(hf).values())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(size, 1, size - 1))
    for convert in (
        lambda: hf_to_torch_dist(hf, tmp_path / "out"),
        lambda: torch_dist_to_hf(tmp_path / "torch_dist", tmp_path / "torch_dist/hf", tmp_path / "out"),
    ):
        with pytest.raises(DiskFullError, match=rf"\d+ bytes are needed and {size - 1} are free.*out"):
            convert()
        assert not (tmp_path / "out").exists()


# Export


def test_export_keeps_the_number_format_of_each_tensor(tmp_path):
    """A training run holds everything in one format; the export restores that of the original folder."""
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe")
    as_trained = {name: tensor.float() for name, tensor in read_tensors(hf).items()}
    config = json.loads((hf / "config.json").read_text())
    write_folder(tmp_path / "fp32", config, as_trained)
    hf_to_torch_dist(tmp_path / "fp32", tmp_path / "torch_dist")
    account = torch_dist_to_hf(tmp_path / "torch_dist", hf, tmp_path / "back")
    assert_same_model(hf, tmp_path / "back")
    kept = sum(tensor.dtype == torch.float32 for tensor in read_tensors(hf).values())
    assert account["casts"] == {"float32 to bfloat16": len(as_trained) - kept}
    assert account["dtypes"] == {"bfloat16": len(as_trained) - kept, "float32": kept}


def test_export_in_another_number_format(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe")
    hf_to_torch_dist(hf, tmp_path / "torch_dist")
    torch_dist_to_hf(tmp_path / "torch_dist", tmp_path / "torch_dist/hf", tmp_path / "fp16", dtype="float16")
    back = read_tensors(tmp_path / "fp16")
    for name, tensor in read_tensors(hf).items():
        assert back[name].dtype == (torch.float32 if ".mlp.gate." in name else torch.float16), name
        assert torch.equal(back[name], tensor.to(back[name].dtype))
    with pytest.raises(ValueError, match=r"dtype 'half' is unknown, it must be one of .*float16"):
        torch_dist_to_hf(tmp_path / "torch_dist", hf, tmp_path / "x", dtype="half")


def test_export_refuses_values_that_the_number_format_cannot_hold(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "llama", change=put("model.norm.weight", 3, 70000.0))
    hf_to_torch_dist(hf, tmp_path / "torch_dist")
    with pytest.raises(ConversionError, match=r"tensor model.norm.weight holds 0 NaN and 1 infinite"):
        torch_dist_to_hf(tmp_path / "torch_dist", tmp_path / "torch_dist/hf", tmp_path / "out", dtype="float16")
    assert not list((tmp_path / "out").glob("*safetensors*"))


def test_export_with_the_reference_of_another_model_names_the_tensors(tmp_path):
    moe = write_checkpoint(tmp_path / "moe", "glm4-moe", num_nextn_predict_layers=1)
    no_mtp = write_checkpoint(tmp_path / "no_mtp", "glm4-moe", num_nextn_predict_layers=0)
    dense = write_checkpoint(tmp_path / "dense", "llama")
    hf_to_torch_dist(moe, tmp_path / "torch_dist")
    with pytest.raises(ConversionError, match=r"LlamaForCausalLM has no MTP layers"):
        torch_dist_to_hf(tmp_path / "torch_dist", dense, tmp_path / "out")
    with pytest.raises(ConversionError, match=r"does not describe this checkpoint; take the .*layers.3.eh_proj"):
        torch_dist_to_hf(tmp_path / "torch_dist", no_mtp, tmp_path / "out")
    hf_to_torch_dist(no_mtp, tmp_path / "torch_dist_no_mtp")
    with pytest.raises(ConversionError, match=r"not of one model: .*missing from the checkpoint: .*linear_fc1"):
        torch_dist_to_hf(tmp_path / "torch_dist_no_mtp", dense, tmp_path / "out")
    account = torch_dist_to_hf(tmp_path / "torch_dist_no_mtp", moe, tmp_path / "trained_without")
    assert account["tensors_left_out"] == len(read_tensors(moe)) - len(read_tensors(no_mtp))
    assert_same_model(tmp_path / "trained_without", no_mtp)


def test_padding_of_the_vocabulary_is_dropped_and_counted(tmp_path):
    """Tensor-parallel ranks share the vocabulary, so a training run may have padded it."""
    hf = write_checkpoint(tmp_path / "hf", "llama")
    rules, tensors = megatron_tensors(hf)
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")
    geometry = geometry_from_config(json.loads((hf / "config.json").read_text()))
    with TorchDistWriter(tmp_path / "trained", geometry) as writer:
        for rule in rules:
            tensor = tensors[rule.megatron]
            writer.write(rule.megatron, F.pad(tensor, (0, 0, 0, 3)) if rule.megatron in padded else tensor)
    account = torch_dist_to_hf(tmp_path / "trained", hf, tmp_path / "back")
    assert account["padding_rows_dropped"] == dict.fromkeys(padded, 3)
    assert_same_model(hf, tmp_path / "back")


# Interruption

CONVERT = """
import os, signal, sys
from pathlib import Path
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.torch_dist_to_hf import torch_dist_to_hf

src, torch_dist, back, stop = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

def killed_half_way(stage):
    def progress(done, total, name):
        if stage == stop and done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return progress

if not (torch_dist / "latest_checkpointed_iteration.txt").exists():
    hf_to_torch_dist(src, torch_dist, progress=killed_half_way("convert"))
torch_dist_to_hf(torch_dist, torch_dist / "hf", back, progress=killed_half_way("export"))
"""


def run_conversion(*arguments: Path | str, hash_seed: int) -> int:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", CONVERT, *map(str, arguments)], env=environment).returncode


def test_a_killed_conversion_looks_unfinished_and_a_second_run_equals_an_undisturbed_one(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", "glm4-moe")
    hf_to_torch_dist(hf, tmp_path / "whole")
    out, back = tmp_path / "out", tmp_path / "back"

    assert run_conversion(hf, out, back, "convert", hash_seed=1) == -signal.SIGKILL
    assert list(out.rglob("*.distcp"))  # it had begun
    with pytest.raises(CheckpointError, match="is no torch_dist checkpoint"):
        TorchDistFolder(out)

    assert run_conversion(hf, out, back, "export", hash_seed=2) == -signal.SIGKILL
    assert contents(out) == contents(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="has no weights"):
        read_tensors(back)

    torch_dist_to_hf(out, out / "hf", back)
    assert_same_model(back, hf)
