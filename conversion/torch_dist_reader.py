"""Reading torch_dist checkpoints tensor by tensor, whatever wrote them: our converter, or megatron-core's
`dist_checkpointing.save` in a training run of any tensor, pipeline and expert parallel size.

Everything but the model's tensors (optimizer, RNG, schedule) is passed over.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from conversion.safetensors_header import CheckpointError, TensorSpec
from conversion.torch_dist_keys import Part, parts_under

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what the tracker says, and the folder is called, where no training run wrote the checkpoint

_EMBEDDING = "embedding.word_embeddings.weight"
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")


def find_checkpoint(folder: Path) -> Path:
    """The torch_dist folder itself, or the one that the tracker file of `folder` points to.

    Raises `CheckpointError` where there is none, or only the rest of an interrupted conversion or save.
    """
    if (folder / "metadata.json").is_file():
        return folder
    if not (folder / TRACKER).is_file():
        raise CheckpointError(f"{folder} is no torch_dist checkpoint: it has neither metadata.json nor {TRACKER}")
    latest = (folder / TRACKER).read_text().strip()
    if latest != RELEASE and not latest.isdecimal():
        raise CheckpointError(f"{folder / TRACKER} says {latest!r}, an iteration or {RELEASE!r} is required")
    found = folder / (RELEASE if latest == RELEASE else f"iter_{int(latest):07d}")
    if not (found / "metadata.json").is_file():
        raise CheckpointError(f"{folder / TRACKER} points to {found.name}, which is no complete torch_dist checkpoint")
    return found


@dataclass(frozen=True)
class _Stored:
    """A part of a Megatron tensor and where its values are."""

    key: str
    part: Part
    metadata: TensorStorageMetadata

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.metadata.size[len(self.part.leading) :])


class TorchDistFolder:
    """The model in a torch_dist checkpoint, under global Megatron names. Reading is thread-safe.

    Raises `CheckpointError` for a folder that is no complete checkpoint: no or unreadable metadata, files that are
    missing or shorter than the metadata says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = find_checkpoint(Path(folder))
        self._metadata = _read_metadata(self.folder / ".metadata")
        self._check_files()
        self._stored: dict[str, list[_Stored]] = defaultdict(list)
        prefix = self._model_prefix()
        for key, stored in self._metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata) or not key.startswith(prefix) or _OPTIMIZER.match(key):
                continue
            for part in parts_under(key.removeprefix(prefix), tuple(stored.size)):
                self._stored[part.name].append(_Stored(key, part, stored))
        for name, parts in self._stored.items():
            parts.sort(key=lambda stored: stored.part.order)
            if [stored.part.order for stored in parts] != list(range(len(parts))):
                raise CheckpointError(f"{self.folder}: {name} is not whole, it has {[s.key for s in parts]} alone")

    def __enter__(self) -> TorchDistFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between reads."""

    @property
    def names(self) -> tuple[str, ...]:
        """Global Megatron names, in the order of the metadata."""
        return tuple(self._stored)

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.spec(name).nbytes for name in self._stored)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of the whole tensor; `file` is that of its first chunk."""
        first, *others = self._parts(name)
        rows = first.shape[:1]
        if others:
            rows = (sum(stored.shape[0] for stored in (first, *others)),)
        chunk = first.metadata.chunks[0]
        file = self._metadata.storage_data[MetadataIndex(first.key, chunk.offsets)].relative_path
        dtype = str(first.metadata.properties.dtype).removeprefix("torch.")
        return TensorSpec(name, rows + first.shape[1:], dtype, file)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, assembled from its chunks."""
        parts = [self._read(stored) for stored in self._parts(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, name: str) -> list[_Stored]:
        if name not in self._stored:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self._stored[name]

    def _read(self, stored: _Stored) -> torch.Tensor:
        """`tensor[leading]` from all chunks that meet it, each of which must be filled exactly once."""
        leading = stored.part.leading
        chunks = [
            chunk
            for chunk in stored.metadata.chunks
            if all(o <= i < o + s for i, o, s in zip(leading, chunk.offsets, chunk.sizes, strict=False))
        ]
        result: torch.Tensor | None = None
        filled = 0
        for chunk in chunks:
            values = self._load(stored.key, chunk.offsets)
            if values.shape != chunk.sizes:
                raise CheckpointError(
                    f"{self.folder}: a chunk of {stored.key} has shape {list(values.shape)}, "
                    f"its metadata says {list(chunk.sizes)}"
                )
            for i, offset in zip(leading, chunk.offsets, strict=False):
                values = values[i - offset]
            if tuple(values.shape) == stored.shape and len(chunks) == 1:
                return values
            if result is None:
                result = torch.empty(stored.shape, dtype=values.dtype)
            starts = chunk.offsets[len(leading) :]
            result[tuple(slice(o, o + s) for o, s in zip(starts, values.shape, strict=True))] = values
            filled += values.numel()
        if result is None or filled != result.numel():
            raise CheckpointError(
                f"{self.folder}: the chunks of {stored.key} hold {filled} values, its shape {list(stored.shape)} "
                "needs another number"
            )
        return result

    def _load(self, key: str, offsets: torch.Size) -> torch.Tensor:
        info = self._metadata.storage_data[MetadataIndex(key, offsets)]
        with (self.folder / info.relative_path).open("rb") as file:
            view: Any = _create_file_view(file, info.offset, info.length)
            try:
                tensor = torch.load(view, map_location="cpu", weights_only=True)
            except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{self.folder / info.relative_path}: {key} can not be read: {error}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _model_prefix(self) -> str:
        prefixes = {
            key.removesuffix(_EMBEDDING)
            for key in self._metadata.state_dict_metadata
            if key.endswith(_EMBEDDING) and not _OPTIMIZER.match(key)
        }
        if len(prefixes) != 1:
            raise CheckpointError(
                f"{self.folder} must hold one model, found {len(prefixes)} with {_EMBEDDING}: {sorted(prefixes)}"
            )
        return prefixes.pop()

    def _check_files(self) -> None:
        needed: dict[str, int] = defaultdict(int)
        for info in self._metadata.storage_data.values():
            needed[info.relative_path] = max(needed[info.relative_path], info.offset + info.length)
        for file, size in sorted(needed.items()):
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{file} is missing from {self.folder}")
            if path.stat().st_size < size:
                raise CheckpointError(f"{path} is truncated: {path.stat().st_size} bytes, its metadata promises {size}")


# .metadata is a pickle, and a pickle can call anything; this one may only build plain data.
_DATA_MODULES = {f"torch.distributed.checkpoint.{module}" for module in ("metadata", "planner", "filesystem")}
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        if (module in _DATA_MODULES or module == "torch") and "." not in name:
            found = super().find_class(module, name)
            if is_dataclass(found) or isinstance(found, torch.dtype | type(Enum)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


def _read_metadata(path: Path) -> Metadata:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing from {path.parent}: the checkpoint was not finished")
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} can not be read: {error}") from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CheckpointError(f"{path} is no torch.distributed.checkpoint metadata")
    return metadata
