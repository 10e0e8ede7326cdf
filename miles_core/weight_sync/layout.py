"""Where tensors lie in a flat buffer."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ROW_BYTES = 512  # tensors start at whole rows, so that copies are wide and digests are of rows


Form = tuple[str, torch.dtype, torch.Size]  # name, dtype, shape


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in its bucket."""

    name: str  # Hugging Face name
    dtype: str  # "float32", "bfloat16", "int32", "float8_e4m3fn"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The tensors of one bucket in order."""

    specs: tuple[TensorSpec, ...]
    nbytes: int

    @cached_property
    def text(self) -> str:
        """JSON, as `from_text` reads it."""
        return json.dumps([[s.name, s.dtype, s.shape, s.offset, s.nbytes] for s in self.specs] + [self.nbytes])

    @cached_property
    def key(self) -> str:
        """Equal for equal layouts."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @classmethod
    def from_text(cls, text: str) -> "Layout":
        """The layout that `text` describes."""
        *specs, nbytes = json.loads(text)
        return cls(tuple(TensorSpec(n, d, tuple(s), o, b) for n, d, s, o, b in specs), nbytes)

    @property
    def forms(self) -> list[Form]:
        """What the layout was made for, in its own order."""
        return [(s.name, getattr(torch, s.dtype), torch.Size(s.shape)) for s in self.specs]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of a flat uint8 buffer."""
        return [flat[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape) for s in self.specs]

    def paddings(self, flat: Tensor) -> list[Tensor]:
        """What lies between the tensors, where anything does."""
        ends = [s.offset + s.nbytes for s in self.specs]
        starts = [s.offset for s in self.specs[1:]] + [self.nbytes]
        return [flat[end:start] for end, start in zip(ends, starts, strict=True) if end < start]


def forms_of(named_tensors: Sequence[tuple[str, Tensor]]) -> list[Form]:
    """What a layout needs to know of tensors."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in named_tensors]


def in_rows(forms: Sequence[Form]) -> Layout:
    """One tensor after the other, each at a whole row."""
    specs, offset = [], 0
    for name, dtype, shape in forms:
        nbytes = shape.numel() * dtype.itemsize
        specs.append(TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape), offset, nbytes))
        offset += padded(nbytes)
    return Layout(tuple(specs), offset)


def without_gaps(forms: Sequence[Form]) -> Layout:
    """End to end, as SGLang lays out the buckets that it receives by broadcast. Tensors with the widest elements come
    first, so that each is aligned to its own."""
    specs, offset = [], 0
    for name, dtype, shape in sorted(forms, key=lambda form: -form[1].itemsize):
        nbytes = shape.numel() * dtype.itemsize
        specs.append(TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape), offset, nbytes))
        offset += nbytes
    return Layout(tuple(specs), offset)


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in whole rows."""
    return -(-nbytes // ROW_BYTES) * ROW_BYTES
