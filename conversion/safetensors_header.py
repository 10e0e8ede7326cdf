"""What a safetensors checkpoint holds, read from its headers alone. No torch.

Format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the tensors' bytes, without gaps.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

# safetensors dtype code -> (torch's name, bytes of an element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
ITEM_SIZES = dict(DTYPES.values())  # torch's name -> bytes


class CheckpointError(ValueError):
    """A folder that is no complete, consistent checkpoint."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "bfloat16"
    file: str  # name of the file in its folder; empty where the tensor is still to be written
    offset: int = 0  # of the first byte in that file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def read_headers(folder: Path) -> dict[str, TensorSpec]:
    """All tensors of the checkpoint, in the order of their files and offsets.

    Raises `CheckpointError` where config.json or a shard is missing or damaged, where index and shards disagree, where
    a tensor occurs twice, and where the weights exist as pickles only.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    read_json(folder / "config.json")
    weight_map = _weight_map(folder)
    specs: dict[str, TensorSpec] = {}
    for shard in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]:
        for spec in read_header(folder / shard):
            if spec.name in specs:
                raise CheckpointError(f"{folder}: tensor {spec.name} is in {specs[spec.name].file} and in {shard}")
            specs[spec.name] = spec
    if weight_map is not None:
        _check_index(folder, weight_map, specs)
    return specs


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object without repeated keys; raises `CheckpointError` naming file and line."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} lacks {path.name}: a Hugging Face checkpoint folder is required")
    return _parse_json(path.read_bytes(), path)


def read_header(path: Path) -> list[TensorSpec]:
    """The tensors of one safetensors file, in the order of their bytes; checks the file's size against them."""
    if not path.is_file():
        raise CheckpointError(f"shard {path.name} is missing from {path.parent}")
    size = path.stat().st_size
    with path.open("rb") as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        if size < data_start or size < 8:
            raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes, its header needs more")
        header = _parse_json(file.read(data_start - 8), path)
    header.pop("__metadata__", None)

    specs, end = [], data_start
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            dtype, item_size = DTYPES[entry["dtype"]]
            spec = TensorSpec(name, tuple(entry["shape"]), dtype, path.name, data_start + entry["data_offsets"][0])
            if entry["data_offsets"] != [end - data_start, end - data_start + math.prod(spec.shape) * item_size]:
                raise CheckpointError(
                    f"{path}: tensor {name} of shape {list(spec.shape)} and dtype {entry['dtype']} "
                    f"has bytes {entry['data_offsets']}, which do not fit"
                )
            specs.append(spec)
            end += spec.nbytes
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: unreadable header entry ({error!r})") from error
    if size != end:
        what = "is truncated" if size < end else "is too long"
        raise CheckpointError(f"{path} {what}: {size} bytes, its header promises {end}")
    return specs


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> shard by the index; None for a checkpoint in a single file."""
    index = folder / INDEX_FILE
    found = sorted(p.name for p in folder.glob("model*.safetensors"))
    if not index.exists():
        if found == [SINGLE_FILE]:
            return None
        if found:
            raise CheckpointError(f"{folder} has shards {_some(found)} but no {INDEX_FILE}")
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{folder} has pickle weights only ({_some(pickles)}), and unpickling runs code from the file; "
                "load it with transformers where you trust it and call save_pretrained, which writes safetensors"
            )
        raise CheckpointError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to shards")
    if not weight_map:
        raise CheckpointError(f"{index} lists no tensor")
    if outside := sorted({shard for shard in weight_map.values() if Path(shard).name != shard}):
        raise CheckpointError(f"{index} points outside its folder: {_some(outside)}")
    if stray := sorted(set(found) - set(weight_map.values())):
        raise CheckpointError(f"{folder} has shards that {INDEX_FILE} does not list: {_some(stray)}")
    return weight_map


def _check_index(folder: Path, weight_map: dict[str, str], specs: dict[str, TensorSpec]) -> None:
    faults = []
    if missing := [name for name in weight_map if name not in specs]:
        faults.append(f"{len(missing)} tensors of the index are in no shard: {_some(missing)}")
    if extra := [name for name in specs if name not in weight_map]:
        faults.append(f"{len(extra)} tensors are in a shard but not in the index: {_some(extra)}")
    if moved := [name for name, shard in weight_map.items() if name in specs and specs[name].file != shard]:
        faults.append(f"{len(moved)} tensors are in another shard than the index says: {_some(moved)}")
    if faults:
        raise CheckpointError(f"{folder / INDEX_FILE}: " + "; ".join(faults))


def _parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
            raise CheckpointError(f"{path}: {_some(twice)} is there twice")
        return result

    try:
        parsed = json.loads(raw, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error.msg} at line {error.lineno}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds a JSON {type(parsed).__name__}, an object is required")
    return parsed


def _some(names: Iterable[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
