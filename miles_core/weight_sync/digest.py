"""A digest of each tensor that a GPU computes at memory speed, with the same value on a CPU.

The bytes of a tensor, padded with zeros to whole rows, are read as int32 words x[r, c], ROW_WORDS to a row, and

    digest = sum over r, c of A[r] * B[c] * x[r, c]   modulo 2^64

with fixed odd 64-bit weights A and B (splitmix64 of the position, its lowest bit set). Integer sums have no order, so
the value is exact on any device. An odd number times a word that is not zero is never zero modulo 2^64: a tensor that
differs in one word always has another digest. Words that are exchanged, shifted or changed together are found
unless their weighted differences cancel, which for unrelated changes has a chance of about 2^-32 or less. It guards
against lost, stale and misplaced bytes, not against somebody who wants to deceive.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from miles_core.weight_sync.layout import ROW_BYTES, Form, Layout, TensorSpec, in_rows
from miles_core.weight_sync.packing import copy_all

ROW_WORDS = ROW_BYTES // 4
_ROWS_AT_ONCE = 2**24 // ROW_BYTES  # products of 16 MiB of words stay in a GPU's cache


def bucket_digests(flat: Tensor, specs: Sequence[TensorSpec]) -> Tensor:
    """Digests of all tensors of a bucket, int64 [len(specs)], on the bucket's device and without waiting for it.

    Args:
        flat: uint8, the bucket; the padding behind each tensor is zero.
        specs: where the tensors lie; each starts at a multiple of ROW_BYTES.
    """
    starts = [spec.offset // ROW_BYTES for spec in specs]
    counts = [-(-spec.nbytes // ROW_BYTES) for spec in specs]
    sums = _row_sums(flat.view(torch.int32).view(-1, ROW_WORDS))
    first_row = torch.tensor(starts, device=flat.device).repeat_interleave(torch.tensor(counts, device=flat.device))
    if len(first_row) != len(sums):
        raise ValueError(f"tensors of {len(first_row)} rows do not fill a bucket of {len(sums)} rows")
    row = torch.arange(len(sums), device=flat.device) - first_row  # within its tensor
    upto = torch.zeros(len(sums) + 1, dtype=torch.int64, device=flat.device)
    torch.cumsum(sums * _odd_weights(max(counts), 2**32, flat.device)[row], 0, out=upto[1:])
    begin = torch.tensor(starts, device=flat.device)
    return upto[begin + torch.tensor(counts, device=flat.device)] - upto[begin]


def digests_in_rows(forms: Sequence[Form], tensors: Sequence[Tensor]) -> tuple[Layout, Tensor]:
    """Digests of tensors that lie anywhere, by way of a bucket of their own."""
    layout = in_rows(forms)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=tensors[0].device)
    copy_all(layout.views(flat), tensors)
    return layout, bucket_digests(flat, layout.specs)


def named_digests(digests: Tensor, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """What `bucket_digests` gave, by name and with dtype and shape, in a form to compare and to print."""
    return {
        spec.name: f"{spec.dtype} {spec.shape} {value % 2**64:016x}"
        for spec, value in zip(specs, digests.tolist(), strict=True)
    }


def _row_sums(words: Tensor) -> Tensor:
    """int64 [R] of int32 words [R, ROW_WORDS]."""
    weights = _odd_weights(ROW_WORDS, 0, words.device)
    sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
    products = torch.empty(min(len(words), _ROWS_AT_ONCE), ROW_WORDS, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _ROWS_AT_ONCE):
        part = words[start : start + _ROWS_AT_ONCE]
        torch.mul(part, weights, out=products[: len(part)])
        torch.sum(products[: len(part)], 1, out=sums[start : start + len(part)])
    return sums


@lru_cache(maxsize=8)
def _odd_weights(count: int, first: int, device: torch.device) -> Tensor:
    """splitmix64(first + i) | 1 for i < count, int64 [count]: public domain, https://prng.di.unimi.it/splitmix64.c"""
    z = (torch.arange(count, dtype=torch.int64, device=device) + first + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
