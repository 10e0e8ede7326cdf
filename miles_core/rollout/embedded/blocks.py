"""The smallest parts of a decoder: RMSNorm and the dense MLP."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from conversion.geometry import ModelGeometry

Allocate = Callable[..., torch.Tensor]
"""allocate(*shape, dtype=...) gives uninitialised storage on the engine's device, by default in its dtype."""

NamedTensors = Iterator[tuple[str, torch.Tensor]]
"""Hugging Face names with the views of a block's (fused) storage that hold these tensors."""


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) over the last dim, times weight or (Gemma) 1 + weight; the quotient in float32."""

    def __init__(self, allocate: Allocate, *shape: int, eps: float, plus_one: bool = False) -> None:
        """`shape` of the weight; dims before the last are heads."""
        self.weight, self.eps, self.plus_one = allocate(*shape), eps, plus_one
        # Tensors, since a Python number costs an operation three times its time.
        self.scale = allocate(1, dtype=torch.float32).fill_(shape[-1] ** -0.5)
        self.root_eps = allocate(1, dtype=torch.float32).fill_(eps**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, *shape]."""
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).mul_(self.scale)
        normed = (x / rms.hypot_(self.root_eps)).to(x.dtype)
        return torch.addcmul(normed, normed, self.weight) if self.plus_one else normed.mul_(self.weight)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[..., 2 * width] -> [..., width]: act(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return act.mul_(up)


class Mlp:
    """Gated MLP; gate and up projections are one matrix."""

    def __init__(self, g: ModelGeometry, width: int, allocate: Allocate, *, bias: bool = False) -> None:
        self.activation = g.activation
        self.gate_up, self.down = allocate(2 * width, g.hidden_size), allocate(g.hidden_size, width)
        self.gate_up_bias = allocate(2 * width) if bias else None
        self.down_bias = allocate(g.hidden_size) if bias else None

    def tensors(self, prefix: str) -> NamedTensors:
        for kind, gate_up, down in (
            ("weight", self.gate_up, self.down),
            ("bias", self.gate_up_bias, self.down_bias),
        ):
            if gate_up is not None and down is not None:
                gate, up = gate_up.chunk(2)
                yield f"{prefix}.gate_proj.{kind}", gate
                yield f"{prefix}.up_proj.{kind}", up
                yield f"{prefix}.down_proj.{kind}", down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        hidden = gated(F.linear(x, self.gate_up, self.gate_up_bias), self.activation)
        return F.linear(hidden, self.down, self.down_bias)
