"""Writing torch_dist checkpoints tensor by tensor, without a model and without megatron-core.

The folder (see conversion/torch_dist_keys.py for the keys):

    __0_0.distcp, __0_1.distcp, ...   tensors, each a torch.save of its own, one after the other
    common.pt                         what is not sharded: nothing but the layout
    .metadata                         pickled torch.distributed.checkpoint Metadata: key -> shape, dtype, file, offset
    metadata.json                     makes megatron-core recognise the folder

Equal tensors in equal order give equal bytes: no paths, times or random ids. Until `close` all of it lies in
`NAME.partial`, so a folder NAME is always whole.
"""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from conversion.disk import naming_full_disk
from conversion.geometry import ModelGeometry
from conversion.mapping import ConversionError
from conversion.torch_dist_keys import extra_state_key, sharded_keys, sharded_state_dict_metadata

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_ALIGNMENT = 64  # of each entry in its file; torch.save aligns the data within an entry


class TorchDistWriter:
    """Writes whole Megatron tensors by their global names, each once.

    A context manager: leaving it normally closes it, leaving it by an exception removes what was written.
    """

    def __init__(self, folder: Path, geometry: ModelGeometry, max_file_bytes: int = 5_000_000_000) -> None:
        self.folder = Path(folder)
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} exists; remove it to convert anew")
        self._partial = self.folder.with_name(self.folder.name + ".partial")
        shutil.rmtree(self._partial, ignore_errors=True)  # of a conversion that was killed
        self._partial.mkdir(parents=True)
        self._geometry = geometry
        self._max_file_bytes = max_file_bytes
        self._metadata = Metadata(state_dict_metadata={}, storage_data={}, version="1.0.0")
        self._num_files = 0
        self._file: BinaryIO = self._next_file()
        # All extra states are the same nothing, so all their keys share one entry.
        self._extra_state = self._append([None])

    def __enter__(self) -> TorchDistWriter:
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

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Raises `ConversionError` for a name given twice."""
        keys = sharded_keys(name, self._geometry)
        tensors = self._metadata.state_dict_metadata
        if keys[0] in tensors:
            raise ConversionError(f"tensor {name} is written twice to {self.folder}")
        for key, part in zip(keys, tensor.chunk(len(keys)), strict=True):
            offsets = torch.Size([0] * part.dim())
            chunk = ChunkStorageMetadata(offsets, part.shape)
            tensors[key] = TensorStorageMetadata(TensorProperties(part.dtype), part.shape, [chunk])
            self._metadata.storage_data[MetadataIndex(key, offsets)] = self._append(_with_own_storage(part))
        if (extra := extra_state_key(name)) is not None:
            tensors[extra] = BytesStorageMetadata()
            self._metadata.storage_data[MetadataIndex(extra)] = self._extra_state

    def close(self) -> None:
        """Writes the metadata and gives the folder its name; the checkpoint is complete after this."""
        self._file.close()
        common = {"content_metadata": sharded_state_dict_metadata(), "iteration": 0, "checkpoint_version": 3.0}
        with naming_full_disk(self._partial):
            with (self._partial / "common.pt").open("wb") as file:
                torch.save(common, file)
            (self._partial / ".metadata").write_bytes(pickle.dumps(self._metadata))
            (self._partial / "metadata.json").write_text(json.dumps(_FORMAT))
        self._partial.rename(self.folder)

    def abort(self) -> None:
        """Removes what was written."""
        with suppress(OSError):  # on a full disk the file's buffer has nowhere to go
            self._file.close()
        shutil.rmtree(self._partial)

    def _next_file(self) -> BinaryIO:
        self._num_files += 1
        return (self._partial / f"__0_{self._num_files - 1}.distcp").open("wb")

    def _append(self, value: object) -> _StorageInfo:
        size = value.nbytes if isinstance(value, torch.Tensor) else 0
        if self._file.tell() and self._file.tell() + size > self._max_file_bytes:
            self._file.close()
            self._file = self._next_file()
        path = Path(self._file.name)
        with naming_full_disk(path, size):
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            start = self._file.tell()
            torch.save(value, self._file)
        return _StorageInfo(path.name, start, self._file.tell() - start)


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous memory with a storage that ends where the tensor ends: torch.save writes whole storages."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(raw).view(tensor.dtype).reshape(tensor.shape)
