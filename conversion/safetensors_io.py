"""Hugging Face checkpoint folders: reading tensor by tensor, writing shard by shard.

Reading maps a tensor's bytes and copies nothing. Writing holds little in memory, and the folder looks complete only
after `close`: shards have temporary names until then, and the file that makes the folder loadable
(model.safetensors.index.json, or model.safetensors alone) comes last.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Collection, Set
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from conversion.disk import naming_full_disk
from conversion.safetensors_header import (
    DTYPES,
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    CheckpointError,
    TensorSpec,
    read_header,
    read_headers,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointError",
    "SafetensorsFolder",
    "SafetensorsWriter",
    "TensorSpec",
    "copy_side_files",
    "read_header",
    "read_headers",
]

_CODES = {torch_name: code for code, (torch_name, _) in DTYPES.items()}
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin.index.json", ".gguf", ".h5", ".msgpack", ".onnx")


class SafetensorsFolder:
    """A complete checkpoint, opened for reading; raises as `read_headers` does. Reading is thread-safe.

    Each tensor maps its own bytes, so resident memory follows the tensors in use and not the shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._specs = read_headers(self.folder)

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between reads."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, in the order of files and offsets."""
        return tuple(self._specs)

    @cached_property
    def total_bytes(self) -> int:
        return sum(spec.nbytes for spec in self._specs.values())

    def spec(self, name: str) -> TensorSpec:
        """Raises `CheckpointError` for an unknown name."""
        if name not in self._specs:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self._specs[name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor as a view of its file, copied only where written to; its storage holds nothing else."""
        import torch

        spec = self.spec(name)
        dtype = getattr(torch, spec.dtype)
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=dtype)
        skip = spec.offset % mmap.ALLOCATIONGRANULARITY
        with (self.folder / spec.file).open("rb") as file:
            # Copy on write: torch wants writable memory, and the file is safe from writes all the same.
            mapped = mmap.mmap(file.fileno(), skip + spec.nbytes, access=mmap.ACCESS_COPY, offset=spec.offset - skip)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=spec.nbytes, offset=skip)
        if spec.offset % dtype.itemsize:
            flat = flat.clone()  # the format does not promise alignment
        return flat.view(dtype).reshape(spec.shape)


class SafetensorsWriter:
    """Writes tensors in the order they come, into shards of at most `max_shard_bytes` (a larger tensor alone).

    A context manager: leaving it normally closes it, leaving it by an exception removes what was written.
    """

    # A header stands before the data but is known after them. Small shards wait in memory; a shard that outgrows
    # _SPILL_BYTES leaves _HEADER_BYTES of room instead (the format allows a header padded with spaces).
    _SPILL_BYTES = 32 << 20
    _HEADER_BYTES = 1 << 20

    def __init__(self, folder: Path, max_shard_bytes: int = 5_000_000_000) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._partial_index = self.folder / f"{INDEX_FILE}.partial"
        there = sorted(p for p in self.folder.glob("model*.safetensors*") if p.suffix != ".partial")
        if there and not self._partial_index.exists():
            raise FileExistsError(f"{self.folder} already holds weights ({there[0].name}); give an empty folder")
        for leftover in (*there, *self.folder.glob("*.partial")):  # of a writer that was killed
            leftover.unlink()
        self.max_shard_bytes = max_shard_bytes
        self.total_size = 0
        self._shard_of: dict[str, int] = {}
        self._shards: list[Path] = []
        self._file: BinaryIO | None = None
        self._start_shard()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if exc_type is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    @property
    def names(self) -> Set[str]:
        """What has been written."""
        return self._shard_of.keys()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Takes the tensor over: it must not change afterwards. Raises `CheckpointError` for a name given twice."""
        if name in self._shard_of:
            raise CheckpointError(f"tensor {name} is written twice to {self.folder}")
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        entry: dict[str, object] = {"dtype": code, "shape": list(tensor.shape)}
        entry_bytes = len(json.dumps({name: entry})) + 64  # with its offsets
        full = self._size + tensor.nbytes > self.max_shard_bytes or self._header_size + entry_bytes > self._HEADER_BYTES
        if self._header and full:
            self._finish_shard()
            self._start_shard()
        self._header[name] = entry | {"data_offsets": [self._size, self._size + tensor.nbytes]}
        self._header_size += entry_bytes
        self._shard_of[name] = len(self._shards)
        self._size += tensor.nbytes
        self.total_size += tensor.nbytes
        self._pending.append(tensor)
        if self._size > self._SPILL_BYTES:
            self._spill(self._HEADER_BYTES)

    def close(self) -> None:
        """Gives the shards and the index their names, in this order; the checkpoint is complete after this."""
        self._finish_shard()
        if len(self._shards) == 1:
            self._shards[0].rename(self.folder / SINGLE_FILE)
            return
        names = [f"model-{i:05d}-of-{len(self._shards):05d}.safetensors" for i in range(1, len(self._shards) + 1)]
        weight_map = {tensor: names[shard] for tensor, shard in sorted(self._shard_of.items())}
        index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
        # Written before the first shard is renamed, so that a later writer can tell such shards from finished ones.
        with naming_full_disk(self._partial_index):
            self._partial_index.write_text(json.dumps(index, indent=2) + "\n")
        for shard, name in zip(self._shards, names, strict=True):
            shard.rename(self.folder / name)
        self._partial_index.rename(self.folder / INDEX_FILE)

    def abort(self) -> None:
        """Removes what was written."""
        if self._file is not None:
            with suppress(OSError):  # on a full disk the file's buffer has nowhere to go
                self._file.close()
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()

    def _start_shard(self) -> None:
        self._header: dict[str, dict[str, object]] = {}
        self._header_size = 0
        self._size = 0
        self._pending: list[torch.Tensor] = []

    def _finish_shard(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        room = self._HEADER_BYTES if self._file is not None else -(-len(header) // 8) * 8
        self._spill(room)
        assert self._file is not None
        with naming_full_disk(self._path), self._file as file:
            file.seek(0)
            file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._shards.append(self._path)
        self._file = None

    @property
    def _path(self) -> Path:
        return self.folder / f"model-{len(self._shards) + 1:05d}.safetensors.partial"

    def _spill(self, header_room: int) -> None:
        import torch

        with naming_full_disk(self._path, sum(tensor.nbytes for tensor in self._pending)):
            if self._file is None:
                self._file = self._path.open("wb")
                self._file.seek(8 + header_room)
            for tensor in self._pending:
                self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._pending.clear()


def copy_side_files(src: Path, dst: Path, leave: Collection[str] = ()) -> list[str]:
    """Copies all that is neither weights nor a weight index: config, generation config, tokenizer, chat templates.

    Hidden files and folders stay behind; so do files named in `leave`, and a manifest, which would declare `dst`
    complete. Returns the copied paths, relative to `src`, sorted.
    """
    stay = {*leave, "MANIFEST.json"}
    copied = []
    for root, folders, files in os.walk(src):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in files:
            if file.startswith(".") or file in stay or file.endswith(_WEIGHT_SUFFIXES + PICKLE_SUFFIXES):
                continue
            relative = (Path(root) / file).relative_to(src)
            target = dst / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with naming_full_disk(target):
                shutil.copyfile(src / relative, target)
            copied.append(str(relative))
    return sorted(copied)
