"""Parts of a layer whose values equal those of the embedded engine's exact mode, bit for bit.

Forward they compute what miles_core/exact/ says, in the order of rollout/embedded/exact.py; backward they are the parts
that they derive from, at the same inputs. One rank must hold a layer as a whole: preflight sees to that.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from miles_core.exact import functions as exact
from miles_core.exact.gradient import linear_with_gradient, valued, with_gradient_of
from miles_core.trainer.megatron.attention import CoreAttention, causal_mask
from miles_core.trainer.megatron.experts import FixedBiasRouter, GroupedExperts
from miles_core.trainer.megatron.norm import RmsNorm

_SCORES_AT_ONCE = 2**22  # bounds the memory of attention: 32 MiB in float64


class ExactRmsNorm(RmsNorm):
    """See `RmsNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        def value(x: Tensor, weight: Tensor) -> Tensor:
            return exact.rms_norm(x, weight, self.eps, plus_one=self.plus_one)

        return with_gradient_of(self.normed, value, x, self.weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return exact.linear(x, exact.weight_rows(weight))


class _ExactLinear:
    """Mixed into a tensor-parallel linear layer of which one rank has everything."""

    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool

    def forward(self, x: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor | None]:
        out = linear_with_gradient(_linear, x, self.weight)
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None


class ExactColumnParallelLinear(_ExactLinear, ColumnParallelLinear):
    """See `ColumnParallelLinear`."""


class ExactRowParallelLinear(_ExactLinear, RowParallelLinear):
    """See `RowParallelLinear`."""


class ExactCoreAttention(CoreAttention):
    """See `CoreAttention`."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = self.rotation.tables(q.shape[2], q.device)
        q, k = exact.rotate(q, cos, sin), exact.rotate(k, cos, sin)
        return with_gradient_of(self._attend_rotated, self._value, q, k, v)

    def _value(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        groups = k.shape[1]
        visible = causal_mask(length, self.window, q.device).repeat(heads // groups, 1)
        parts = max(1, _SCORES_AT_ONCE // (heads * length * length))
        outs = [
            exact.attention(q, k, v, visible, self.scale, self.softcap, self.config.geometry.max_position)
            for q, k, v in zip(
                q.unflatten(1, (groups, -1)).flatten(2, 3).split(parts), k.split(parts), v.split(parts), strict=True
            )
        ]
        return torch.cat(outs).reshape(batch, heads, length, -1)


class ExactRouter(FixedBiasRouter):
    """See `FixedBiasRouter`."""

    def gating(self, x: Tensor) -> Tensor:
        return linear_with_gradient(_linear, x.float(), self.weight.float())

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, chosen = super().routing(logits, *args, **kwargs)
        moe = self.config.geometry.moe
        return valued(probs, exact.gate(logits.detach().view_as(probs), chosen, moe)), chosen


class ExactExperts(GroupedExperts):
    """See `GroupedExperts`."""

    def _mlps(self, ends: Tensor, tokens: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        def plain(*inputs: Tensor) -> Tensor:
            return GroupedExperts._mlps(self, ends, *inputs)

        def value(tokens: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
            counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            outs = []
            for rows, weights, gate_up, down in zip(tokens.split(counts), probs.split(counts), fc1, fc2, strict=True):
                gate, up = _linear(rows, gate_up).chunk(2, -1)
                hidden = self.config.activation_func(gate) * up
                outs.append(_linear((hidden * weights.unsqueeze(-1)).to(tokens.dtype), down))
            return torch.cat(outs)

        return with_gradient_of(plain, value, tokens, probs, fc1, fc2)
