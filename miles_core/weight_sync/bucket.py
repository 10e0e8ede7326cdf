"""Weights on their way from the trainer to an engine: few large flat buffers instead of one message a tensor."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch


class WeightSyncError(RuntimeError):
    """A push that does not account for every tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in its bucket."""

    name: str  # Hugging Face name
    dtype: str  # "float32", "bfloat16", "int32", "float8_e4m3fn"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


@dataclass(frozen=True)
class WeightBucket:
    """Several tensors in one flat uint8 buffer; numpy, so that it crosses process borders without a copy."""

    specs: tuple[TensorSpec, ...]
    data: np.ndarray  # uint8 [bytes]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as views of the buffer: read only, valid while the bucket lives."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # Ray's are not; we only read
            flat = torch.from_numpy(self.data)
        for spec in self.specs:
            raw = flat[spec.offset : spec.offset + spec.nbytes]
            yield spec.name, raw.view(getattr(torch, spec.dtype)).reshape(spec.shape)


_ALIGNMENT = 16  # so that every dtype can be viewed in place


def bucketize(named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Packs tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own)."""
    pending: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = _padded(tensor.nbytes)
        if pending and size + nbytes > bucket_bytes:
            yield _pack(pending, size)
            pending, size = [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield _pack(pending, size)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(tensors: list[tuple[str, torch.Tensor]], size: int) -> WeightBucket:
    data = np.empty(size, dtype=np.uint8)
    flat = torch.from_numpy(data)
    specs, offset = [], 0
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        flat[offset : offset + nbytes].copy_(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8))
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, nbytes))
        offset += _padded(nbytes)
    return WeightBucket(tuple(specs), data)


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
