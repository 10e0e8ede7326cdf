"""The matrix products of a decoder layer, in the one place where their number format is decided.

Linear layers and routed experts multiply through these two functions. Embedding, output layer, router, norms, attention
scores, and the projection of an MTP layer's inputs never do: they stay in `trainer.precision`.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Products(Protocol):
    """Differentiable in both operands."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., k] times weight [n, k] transposed -> [..., n]."""
        ...

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows [m, k], sorted by expert, times that expert's weight [experts, n, k] transposed -> [m, n].

        `ends`, int32 [experts], is where each expert's rows end.
        """
        ...

    def check(self, name: str, weight: Tensor) -> None:
        """Raises ValueError where this rank's part of a weight, [..., n, k], can't be multiplied with."""
        ...


class PlainProducts:
    """In the operands' own dtype."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    def check(self, name: str, weight: Tensor) -> None:
        """Any will do."""
