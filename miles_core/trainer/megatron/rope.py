"""Rotary position embedding, applied in our core attention.

megatron-core applies it before, sequence by sequence where they are packed, knows one set of Llama 3 constants, and one
base for all layers.
"""

import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from conversion.geometry import RopeGeometry
from miles_core.rope import rope_frequencies


@dataclass(frozen=True)
class Rotation:
    """Rotates `rotary_dim` dims of each head by angles that grow with the position (Su et al. 2104.09864)."""

    theta: float
    rotary_dim: int
    interleaved: bool
    scaling: tuple[tuple[str, Any], ...]  # items of config.json's rope scaling
    first_dim: int  # of those that are rotated

    @classmethod
    def of(cls, rope: RopeGeometry, first_dim: int = 0) -> Self:
        scaling = tuple(sorted((rope.scaling or {}).items()))
        return cls(rope.theta, rope.rotary_dim, rope.interleaved, scaling, first_dim)

    def of_rows(self, x: Tensor) -> Tensor:
        """x [..., s, head_dim] -> the same, place i of s rotated as position i."""
        cos, sin = (table[: x.shape[-2]] for table in _tables(self, _power_of_two(x.shape[-2]), x.device))
        return self._turn(x, cos, sin)

    def of_packed(self, x: Tensor, positions: Tensor, longest: int) -> Tensor:
        """x [t, heads, head_dim] -> the same, token i rotated as position `positions[i]`; int64 [t], all < `longest`."""
        cos, sin = (table[positions].unsqueeze(1) for table in _tables(self, _power_of_two(longest), x.device))
        return self._turn(x, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype), self.first_dim, self.interleaved)


def _power_of_two(length: int) -> int:
    """At least `length`: so that few tables are made."""
    return 1 << max(length - 1, 0).bit_length()


@functools.lru_cache(maxsize=32)
def _tables(rotation: Rotation, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, rotary_dim / 2]; made once for all layers."""
    rope = RopeGeometry(rotation.theta, rotation.rotary_dim, rotation.interleaved, dict(rotation.scaling) or None)
    frequencies, scale = rope_frequencies(rope)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


class _Rotate(torch.autograd.Function):
    """Each pair of dims (a, b) -> (a cos - b sin, b cos + a sin): dims i and i + rotary_dim / 2 form one, or, where
    interleaved, dims 2 i and 2 i + 1. Its gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, first_dim: int, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.first_dim, ctx.interleaved = first_dim, interleaved
        half = cos.shape[-1]
        rotated = slice(first_dim, first_dim + 2 * half)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out[..., :first_dim] = x[..., :first_dim]
        out[..., rotated.stop :] = x[..., rotated.stop :]
        a, b = _pairs(x[..., rotated], half, interleaved)
        out_a, out_b = _pairs(out[..., rotated], half, interleaved)
        torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out_b).addcmul_(a, sin)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, -sin, ctx.first_dim, ctx.interleaved), None, None, None, None


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dims of the pairs."""
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
