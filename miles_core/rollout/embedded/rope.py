"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extensions."""

from dataclasses import replace

import torch

from conversion.geometry import ModelGeometry, RopeGeometry
from miles_core.exact.functions import rotate
from miles_core.rope import rope_frequencies


class RopeTable:
    """Cosines and sines of positions 0 ... length - 1, float32 [length, rotary_dim].

    Both have a column for each dim; the sign of the rotation is folded into `sin`, so that with `partner` the other
    dim of each pair a rotated vector is `x * cos + partner(x) * sin`.
    """

    def __init__(self, rope: RopeGeometry, length: int, device: torch.device) -> None:
        frequencies, scale = rope_frequencies(rope)
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
