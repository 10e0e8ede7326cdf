"""Batches of whole sequences, padded on the right."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

# Bounds the memory of activations; longer batches are not faster.
_BATCH_TOKENS = 16384


def padded_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sequences to run together, shortest first, so that little is padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad(sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """Token ids, int64 [sequences, longest]; what is behind a sequence's end is never looked at."""
    padded = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    for row, ids in zip(padded, sequences, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(padded)
