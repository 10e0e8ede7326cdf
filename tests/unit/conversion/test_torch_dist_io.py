"""torch_dist folders: what is written, what torch's own reader makes of it, and what damage is called."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import Tensors, same_bits
from tiny_models import saved_config
from torch.distributed.checkpoint import FileSystemReader, load_state_dict
from torch.distributed.checkpoint.metadata import Metadata

from conversion.families import geometry_from_config, rules_for
from conversion.geometry import ModelGeometry
from conversion.mapping import ConversionError
from conversion.safetensors_header import CheckpointError
from conversion.torch_dist_keys import sharded_keys
from conversion.torch_dist_reader import TorchDistFolder, find_checkpoint
from conversion.torch_dist_writer import TorchDistWriter

GEOMETRY: ModelGeometry = geometry_from_config(saved_config("qwen3-moe"))


def random_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        rule.megatron: torch.randn(rule.shape, generator=generator).to(torch.bfloat16 if i % 2 else torch.float32)
        for i, rule in enumerate(rules_for(GEOMETRY, 0))
    }


def write(folder: Path, max_file_bytes: int = 40_000) -> Tensors:
    tensors = random_tensors()
    with TorchDistWriter(folder, GEOMETRY, max_file_bytes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        assert not folder.exists()
    return tensors


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_reader_gives_what_the_writer_took(tmp_path: Path) -> None:
    tensors = write(tmp_path / "out")
    folder = TorchDistFolder(tmp_path / "out")
    assert folder.names == tuple(tensors)
    assert folder.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert same_bits(folder.read(name), tensor), name
        spec = folder.spec(name)
        assert (spec.shape, f"torch.{spec.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert (tmp_path / "out" / spec.file).is_file()
    with pytest.raises(CheckpointError, match=r"has no tensor nothing"):
        folder.read("nothing")


def test_torch_distributed_checkpoint_reads_it(tmp_path: Path) -> None:
    """The format's own reader: one process, whole tensors."""
    tensors = write(tmp_path / "out")
    expected = {
        key: part
        for name, tensor in tensors.items()
        for key, part in zip(sharded_keys(name, GEOMETRY), tensor.chunk(len(sharded_keys(name, GEOMETRY))), strict=True)
    }
    state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    load_state_dict(state, FileSystemReader(tmp_path / "out"), no_dist=True)
    assert all(same_bits(state[key], tensor) for key, tensor in expected.items())


def test_files_are_limited_deterministic_and_hold_each_value_once(tmp_path: Path) -> None:
    tensors = write(tmp_path / "one")
    write(tmp_path / "two")
    files = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()}
    data = {name: raw for name, raw in files.items() if name.endswith(".distcp")}
    assert set(data) == {f"__0_{i}.distcp" for i in range(len(data))} and len(data) > 4
    assert max(map(len, data.values())) < 40_000 + 2_000 * 20
    entries = len(pickle.loads(files[".metadata"]).storage_data)
    assert sum(map(len, data.values())) < sum(t.nbytes for t in tensors.values()) + 1_800 * entries


def test_writer_takes_each_name_once_and_no_existing_folder(tmp_path: Path) -> None:
    with TorchDistWriter(tmp_path / "out", GEOMETRY) as writer:
        writer.write("decoder.layers.0.mlp.linear_fc1.weight", torch.zeros(4, 2))
        with pytest.raises(ConversionError, match=r"tensor decoder.layers.0.mlp.linear_fc1.weight is written twice"):
            writer.write("decoder.layers.0.mlp.linear_fc1.weight", torch.zeros(4, 2))
    with pytest.raises(FileExistsError, match="remove it to convert anew"):
        TorchDistWriter(tmp_path / "out", GEOMETRY)


def test_an_interrupted_write_leaves_nothing_and_a_killed_one_is_cleaned_up(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TorchDistWriter(tmp_path / "out", GEOMETRY):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    killed = TorchDistWriter(tmp_path / "out", GEOMETRY, max_file_bytes=1)
    for name, tensor in random_tensors().items():
        killed.write(name, tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    write(tmp_path / "out", max_file_bytes=10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "metadata.json",
    ]


def test_find_checkpoint_follows_the_tracker(tmp_path: Path) -> None:
    for name in ("release", "iter_0000012"):
        write(tmp_path / name)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    with pytest.raises(CheckpointError, match=r"neither metadata.json nor latest_checkpointed_iteration.txt"):
        find_checkpoint(tmp_path)
    for text, found in (("release", "release"), ("12\n", "iter_0000012")):
        tracker.write_text(text)
        assert find_checkpoint(tmp_path) == tmp_path / found
        assert find_checkpoint(tmp_path / found) == tmp_path / found
    tracker.write_text("13")
    with pytest.raises(CheckpointError, match=r"points to iter_0000013, which is no complete"):
        find_checkpoint(tmp_path)
    tracker.write_text("latest")
    with pytest.raises(CheckpointError, match=r"says 'latest', an iteration or 'release' is required"):
        find_checkpoint(tmp_path)


FC1 = "decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight"


def forget(key: str) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.state_dict_metadata.pop(key)


def shrink_chunks(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata["output_layer.weight"].chunks[0]  # type: ignore[union-attr]
    chunk.sizes = torch.Size([7, 64])


def lose_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["output_layer.weight"].chunks.clear()  # type: ignore[union-attr]


def second_model(metadata: Metadata) -> None:
    tensors = metadata.state_dict_metadata
    tensors["critic.embedding.word_embeddings.weight"] = tensors["embedding.word_embeddings.weight"]


DAMAGE = {
    "missing file": (lambda f: (f / "__0_1.distcp").unlink(), r"__0_1.distcp is missing"),
    "truncated file": (lambda f: os.truncate(f / "__0_1.distcp", 5_000), r"__0_1.distcp is truncated: 5000 bytes, its"),
    "overwritten values": (
        lambda f: (f / TorchDistFolder(f).spec("output_layer.weight").file).write_bytes(bytes(200_000)),
        r"distcp: output_layer.weight can not be read",
    ),
    "no metadata": (lambda f: (f / ".metadata").unlink(), r".metadata is missing .*was not finished"),
    "truncated metadata": (lambda f: os.truncate(f / ".metadata", 1_000), r".metadata can not be read"),
    "empty metadata": (lambda f: os.truncate(f / ".metadata", 0), r".metadata can not be read"),
    "metadata of another kind": (lambda f: (f / ".metadata").write_bytes(pickle.dumps({})), r"no torch.distributed"),
    "half of a gated tensor": (lambda f: change_metadata(f, forget(f"{FC1}_w")), r"local_experts.3.*not whole, it has"),
    "two models": (lambda f: change_metadata(f, second_model), r"must hold one model, found 2 .*'critic\.'"),
    "no model": (
        lambda f: change_metadata(f, lambda m: m.state_dict_metadata.clear()),
        r"must hold one model, found 0 ",
    ),
    "chunk of another shape": (
        lambda f: change_metadata(f, shrink_chunks),
        r"a chunk of output_layer.weight has shape",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    write(tmp_path / "out")
    damage, message = DAMAGE[case]
    damage(tmp_path / "out")
    with pytest.raises(CheckpointError, match=message):
        TorchDistFolder(tmp_path / "out").read("output_layer.weight")


class _Call:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.path,)


def test_metadata_that_calls_functions_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out/.metadata").write_bytes(pickle.dumps(_Call(tmp_path / "called")))
    with pytest.raises(CheckpointError, match=r"has no place in checkpoint metadata"):
        TorchDistFolder(tmp_path / "out")
    assert not (tmp_path / "called").exists()
