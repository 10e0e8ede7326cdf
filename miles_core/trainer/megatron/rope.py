"""Rotary position embedding, applied in our core attention.

megatron-core applies it before, sequence by sequence where they are packed, knows one set of Llama 3 constants, and one
base for all layers.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from conversion.geometry import RopeGeometry


@dataclass(frozen=True)
class Rotation:
    """Rotates the first `rotary_dim` dims of each head by angles that grow with the position (Su et al. 2104.09864)."""

    theta: float
    rotary_dim: int
    scaling: tuple[tuple[str, Any], ...]  # items of config.json's rope scaling

    @classmethod
    def of(cls, rope: RopeGeometry) -> Self:
        return cls(rope.theta, rope.rotary_dim, tuple(sorted((rope.scaling or {}).items())))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., s, head_dim] -> the same, place i of s rotated as position i."""
        cos, sin = self.tables(x.shape[-2], x.device)
        return _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype))

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [length, rotary_dim / 2]."""
        return _tables(self, length, device)

    def inverse_frequencies(self) -> Tensor:
        """Angle per position of each pair of dims, float32 [rotary_dim / 2]: theta^(-2i / rotary_dim), scaled.

        linear: divided by `factor` (Chen et al. 2306.15595). llama3: wavelengths beyond the original context are
        divided by `factor`, short ones kept, those between interpolated (Llama 3.1 reference code).
        """
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        frequencies = 1.0 / (self.theta**exponents)
        if not self.scaling:
            return frequencies
        scaling = dict(self.scaling)
        slowed = frequencies / scaling["factor"]
        if scaling["rope_type"] == "linear":
            return slowed
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * slowed + kept * frequencies


@functools.lru_cache(maxsize=16)
def _tables(rotation: Rotation, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Made once for all layers."""
    angles = torch.outer(torch.arange(length).float(), rotation.inverse_frequencies()).to(device)
    return angles.cos(), angles.sin()


class _Rotate(torch.autograd.Function):
    """Dims i and i + rotary_dim / 2 form a pair: (a, b) -> (a cos - b sin, b cos + a sin). Its gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
        out[..., 2 * half :] = rest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, -sin), None, None
