"""Weights on their way from the trainer to an engine: few large flat buffers instead of one message a tensor."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.weight_sync.layout import TensorSpec, forms_of, in_rows
from miles_core.weight_sync.packing import copy_all, full_groups


class WeightSyncError(RuntimeError):
    """A push that does not account for every tensor."""


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


def bucketize(named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Packs tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own)."""
    for tensors, _ in full_groups(named_tensors, bucket_bytes):
        layout = in_rows(forms_of(tensors))
        data = np.zeros(layout.nbytes, dtype=np.uint8)
        copy_all(layout.views(torch.from_numpy(data)), [tensor for _, tensor in tensors])
        yield WeightBucket(layout.specs, data)


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
