"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extensions."""

import math
from dataclasses import replace
from typing import Any

import torch

from conversion.geometry import ModelGeometry, RopeGeometry
from miles_core.exact.functions import rotate


class RopeTable:
    """Cosines and sines of positions 0 ... length - 1, float32 [length, rotary_dim].

    Both have a column for each dim; the sign of the rotation is folded into `sin`, so that with `partner` the other
    dim of each pair a rotated vector is `x * cos + partner(x) * sin`.
    """

    def __init__(self, rope: RopeGeometry, length: int, device: torch.device) -> None:
        frequencies, scale = _frequencies(rope)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        if rope.interleaved:  # pairs (0, 1), (2, 3), ...
            cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:  # pairs (0, d / 2), (1, d / 2 + 1), ...
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        self.interleaved = rope.interleaved
        self.cos, self.sin = cos.to(device), sin.to(device)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """The rotation of tokens at int64 positions [tokens]."""
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in (self.cos, self.sin))
        return Rotation(cos, sin, self.interleaved)


class Rotation:
    """Rotates each token of a batch by its own position."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
        self.cos, self.sin, self.interleaved = cos, sin, interleaved  # [tokens, 1, rotary_dim]

    def apply_(self, x: torch.Tensor) -> None:
        """Rotates the first rotary_dim dims of x [tokens, heads, dim] in place."""
        width = self.cos.shape[-1]
        x = x[..., :width]
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else x.roll(width // 2, dims=-1)
        x.mul_(self.cos).addcmul_(partner, self.sin)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """A rotated copy of x, in the same steps as in training with trainer.exact."""
        half = self.cos.shape[-1] // 2
        return rotate(x, self.cos[..., :half], self.sin[..., half:])


class RopeTables:
    """The tables of a model; its sliding layers may have one of their own (Gemma 3)."""

    def __init__(self, g: ModelGeometry, length: int, device: torch.device) -> None:
        self.full = self.sliding = RopeTable(g.rope, length, device)
        if g.local_rope_theta is not None:
            self.sliding = RopeTable(replace(g.rope, theta=g.local_rope_theta, scaling=None), length, device)


def _frequencies(rope: RopeGeometry) -> tuple[torch.Tensor, float]:
    """Frequency of each pair, float32 [rotary_dim / 2], and a factor on cosines and sines."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling or {}
    match scaling.get("rope_type", "default"):
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / scaling["factor"], 1.0
        case "llama3":
            return _llama3(frequencies, scaling), 1.0
        case "yarn":
            return _yarn(frequencies, rope, scaling)
        case unknown:
            raise ValueError(f"rope_type {unknown!r} of config.json: the embedded engine has no such RoPE scaling")


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * (frequencies / scaling["factor"])


def _yarn(frequencies: torch.Tensor, rope: RopeGeometry, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over the dims instead of over the wave lengths."""
    factor, half = scaling["factor"], rope.rotary_dim // 2

    def dim_that_turns(times: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return rope.rotary_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_that_turns(scaling.get("beta_fast") or 32), dim_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    slowed = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return slowed * frequencies / factor + (1 - slowed) * frequencies, _yarn_scale(scaling)


def _yarn_scale(scaling: dict[str, Any]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return given
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(scaling["factor"], mscale) / _mscale(scaling["factor"], mscale_all_dim)
    return _mscale(scaling["factor"], 1.0)


def _mscale(factor: float, mscale: float) -> float:
    """Growth of the attention logits with the context, equation 22 of YaRN."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
