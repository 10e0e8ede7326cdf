"""The changes of layout between Hugging Face and Megatron tensors: exact and invertible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conversion.mapping import Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Identity:
    """The same tensor under another name."""

    def to_megatron(self, hf: Sequence["Tensor"]) -> "Tensor":
        (tensor,) = hf
        return tensor

    def to_hf(self, megatron: "Tensor") -> list["Tensor"]:
        return [megatron.contiguous()]

    def hf_shapes(self, megatron: Shape) -> list[Shape]:
        return [megatron]


@dataclass(frozen=True)
class GateUp:
    """Gate and up projection [width, ...] each, stacked as [2 * width, ...], gate first."""

    def to_megatron(self, hf: Sequence["Tensor"]) -> "Tensor":
        import torch

        return torch.cat(list(hf))

    def to_hf(self, megatron: "Tensor") -> list["Tensor"]:
        return [half.contiguous() for half in megatron.chunk(2)]

    def hf_shapes(self, megatron: Shape) -> list[Shape]:
        rows, *rest = megatron
        return [(rows // 2, *rest)] * 2


@dataclass(frozen=True)
class MergeQkv:
    """Query, key and value projections, weights [heads * head_dim, hidden] or biases [heads * head_dim].

    Megatron keeps what one key-value head needs together, so that tensor parallelism can cut between groups:
    [kv heads, query heads of the group | key | value, head_dim, ...], flattened to rows.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def to_megatron(self, hf: Sequence["Tensor"]) -> "Tensor":
        import torch

        query, key, value = (tensor.unflatten(0, (self.num_kv_heads, -1)) for tensor in hf)
        return torch.cat([query, key, value], dim=1).flatten(0, 1)

    def to_hf(self, megatron: "Tensor") -> list["Tensor"]:
        groups = megatron.unflatten(0, (self.num_kv_heads, -1))
        widths = [self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1).contiguous() for part in groups.split(widths, dim=1)]

    def hf_shapes(self, megatron: Shape) -> list[Shape]:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return [(count * self.head_dim, *megatron[1:]) for count in heads]
