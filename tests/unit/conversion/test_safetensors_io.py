"""Reading and writing of safetensors folders, against the safetensors package and against damage."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.disk import DiskFullError, naming_full_disk, require_free_space
from conversion.safetensors_io import (
    CheckpointError,
    SafetensorsFolder,
    SafetensorsWriter,
    copy_side_files,
    read_headers,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i, dtype in enumerate(DTYPES):
        raw = torch.randint(0, 2, (3, 5, dtype.itemsize), generator=generator, dtype=torch.uint8)
        tensors[f"t{i}.{dtype}"] = raw.view(dtype).reshape(3, 5)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4, dtype=torch.bfloat16)
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).T
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def make_checkpoint(folder: Path, shards: int = 2) -> dict[str, torch.Tensor]:
    """Written by the safetensors package: weights w0..w5 of 8 floats each, in `shards` files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["Some"]}')
    tensors = {f"w{i}": torch.arange(8.0) + i for i in range(6)}
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names[shard::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = folder / "model.safetensors.index.json"
    parsed = json.loads(index.read_text())
    change(parsed["weight_map"])
    index.write_text(json.dumps(parsed))


def test_single_file_is_read_by_the_safetensors_package(tmp_path: Path) -> None:
    tensors = tensors_of_all_dtypes()
    with SafetensorsWriter(tmp_path) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_reader_gives_what_the_safetensors_package_wrote(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors_of_all_dtypes().items()}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder:
        assert set(folder.names) == set(tensors)
        for name, tensor in tensors.items():
            read = folder.read(name)
            assert same_bits(read, tensor), name
            assert read.untyped_storage().nbytes() == tensor.nbytes  # torch.save of it writes no more than it
            spec = folder.spec(name)
            assert (spec.shape, spec.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert folder.total_bytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("spill_bytes", [0, 100, 1 << 20])
def test_shards_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill_bytes: int) -> None:
    monkeypatch.setattr(SafetensorsWriter, "_SPILL_BYTES", spill_bytes)
    tensors = {f"w{i}": torch.full((16,), float(i)) for i in range(5)}  # 64 bytes each
    tensors["large"] = torch.arange(100.0)
    with SafetensorsWriter(tmp_path, max_shard_bytes=130) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        assert all(p.suffix == ".partial" for p in tmp_path.iterdir())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 64 + 400
    assert index["weight_map"] == {
        name: f"model-{shard:05d}-of-00004.safetensors"
        for name, shard in {"w0": 1, "w1": 1, "w2": 2, "w3": 2, "w4": 3, "large": 4}.items()
    }
    assert len(list(tmp_path.iterdir())) == 5
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_many_small_tensors_start_a_new_shard_when_the_header_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SafetensorsWriter, "_SPILL_BYTES", 0)
    monkeypatch.setattr(SafetensorsWriter, "_HEADER_BYTES", 512)
    tensors = {f"tensor.{i}": torch.tensor([i]) for i in range(20)}
    with SafetensorsWriter(tmp_path) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (tmp_path / "config.json").write_text("{}")
    with SafetensorsFolder(tmp_path) as folder:
        assert len({folder.spec(name).file for name in folder.names}) > 1
        assert {name: int(folder.read(name)) for name in folder.names} == {f"tensor.{i}": i for i in range(20)}


def test_an_interrupted_write_leaves_nothing_and_a_killed_one_is_cleaned_up(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(tmp_path, max_shard_bytes=10) as writer:
        writer.write("a", torch.zeros(4))
        writer.write("b", torch.zeros(4))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []

    killed = SafetensorsWriter(tmp_path, max_shard_bytes=10)
    killed.write("a", torch.zeros(4))
    killed.write("b", torch.zeros(4))
    assert [p.name for p in tmp_path.iterdir()] == ["model-00001.safetensors.partial"]
    with SafetensorsWriter(tmp_path) as writer:
        writer.write("a", torch.ones(4))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_writer_killed_while_it_renames_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = SafetensorsWriter(tmp_path, max_shard_bytes=10)
    killed.write("a", torch.zeros(4))
    killed.write("b", torch.zeros(4))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, target: os.replace(path, target) if "00001" in path.name else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            killed.close()
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has shards model-00001-of-00002.safetensors but no "):
        read_headers(tmp_path)
    with SafetensorsWriter(tmp_path) as writer:
        writer.write("a", torch.ones(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_writer_refuses_duplicates_and_finished_folders(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path) as writer:
        writer.write("a", torch.zeros(1))
        with pytest.raises(CheckpointError, match="tensor a is written twice"):
            writer.write("a", torch.zeros(1))
    with pytest.raises(FileExistsError, match=r"already holds weights \(model.safetensors\)"):
        SafetensorsWriter(tmp_path)


def truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "lacks config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text('{\n"a": }'),
        r"no valid JSON.*line 2",
    ),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "holds a JSON list"),
    "missing shard": (lambda f: (f / SHARD_2).unlink(), f"shard {SHARD_2} is missing"),
    "truncated data": (lambda f: truncate(f / SHARD_1, 1), f"{SHARD_1} is truncated: .* bytes, its header promises"),
    "truncated header": (lambda f: os.truncate(f / SHARD_1, 20), f"{SHARD_1} is truncated"),
    "empty shard": (lambda f: os.truncate(f / SHARD_1, 0), f"{SHARD_1} is truncated"),
    "trailing bytes": (lambda f: (f / SHARD_1).open("ab").write(b"x"), f"{SHARD_1} is too long"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "has shards .* but no model.safetensors.ind"),
    "index without map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "tensor missing from shards": (
        lambda f: rewrite_index(f, lambda m: m.update(w9=SHARD_1)),
        "1 tensors of the index are in no shard: w9",
    ),
    "tensor missing from index": (
        lambda f: rewrite_index(f, lambda m: m.pop("w3")),
        "1 tensors are in a shard but not in the index: w3",
    ),
    "tensor in another shard": (
        lambda f: rewrite_index(f, lambda m: m.update(w0=SHARD_2)),
        "another shard than the index says: w0",
    ),
    "stray shard": (lambda f: save_file({"x": torch.zeros(1)}, f / "model-00003.safetensors"), "does not list: model-"),
    "outside the folder": (lambda f: rewrite_index(f, lambda m: m.update(w0="../x")), "outside its folder: ../x"),
    "tensor twice": (
        lambda f: save_file({"w0": torch.zeros(1), "w1": torch.zeros(1)}, f / SHARD_2),
        f"tensor w0 is in {SHARD_1} and in {SHARD_2}",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    make_checkpoint(tmp_path)
    assert len(read_headers(tmp_path)) == 6
    damage, message = DAMAGE[case]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)


def test_pickle_only_checkpoint_is_refused_with_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle weights only \(pytorch_model.bin\).*save_pretrained"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            "tensor a of shape .2. and dtype F32 has",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "do not fit"),  # a gap before it
        ({"a": {"dtype": "F32", "shape": [1]}}, "unreadable header entry"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, "unreadable header entry .*F99"),
    ],
)
def test_inconsistent_header_is_named(tmp_path: Path, header: dict, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 8)
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)


def test_name_twice_in_a_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    raw = f'{{"a":{entry},"a":{entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(CheckpointError, match="a is there twice"):
        read_headers(tmp_path)


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    code = (
        "import sys; from pathlib import Path; from conversion.safetensors_io import read_headers; "
        f"assert len(read_headers(Path({str(tmp_path)!r}))) == 6; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_side_files_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    make_checkpoint(src)
    (src / "additional_chat_templates").mkdir()
    (src / ".cache").mkdir()
    kept = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "additional_chat_templates/tools.jinja"]
    for name in [
        *kept,
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "tf_model.h5",
        ".gitattributes",
        ".cache/x",
    ]:
        (src / name).write_text(name)
    assert copy_side_files(src, dst) == sorted([*kept, "config.json"])
    assert sorted(str(p.relative_to(dst)) for p in dst.rglob("*") if p.is_file()) == sorted([*kept, "config.json"])
    assert (dst / "tokenizer.json").read_text() == "tokenizer.json"


def test_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=f"{1 << 60} bytes are needed and .* are free.*new"):
        require_free_space(tmp_path / "new" / "folder", 1 << 60)
    require_free_space(tmp_path / "new" / "folder", 1)
    with pytest.raises(DiskFullError, match=r"is full while writing 7 bytes.*shard") as caught:  # noqa: SIM117
        with naming_full_disk(tmp_path / "shard", 7), Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x" * 7)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError), naming_full_disk(tmp_path / "shard"):
        (tmp_path / "absent").read_bytes()
