"""Context parallelism: each rank of the group holds one stretch of the tokens, [S / c] of S.

Attention needs all tokens, so it trades stretches for heads and back (DeepSpeed-Ulysses, Jacobs et al. 2309.14509):
between the two exchanges a rank has every token of h / c heads. So attention, rotation and masks are those of one rank,
and causal work is balanced however the sequences lie. Each rank sends (c - 1) / c of its queries, keys, values and
outputs once forward and once backward.
"""

from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


def heads_for_tokens(x: Tensor) -> Tensor:
    """[s / c, ..., heads, d] of this rank's tokens -> [s, ..., heads / c, d], this rank's heads of all tokens.

    Fewer key-value heads than ranks are repeated until each rank has one.
    """
    group = parallel_state.get_context_parallel_group()
    size, heads = group.size(), x.shape[-2]
    if heads % size:
        x = x.repeat_interleave(lcm(heads, size) // heads, dim=-2)
    by_receiver = x.unflatten(-2, (size, -1)).movedim(-3, 0)
    return _exchange(by_receiver, group).flatten(0, 1)


def tokens_for_heads(x: Tensor) -> Tensor:
    """[s, ..., heads / c, d] -> [s / c, ..., heads, d]; the inverse of `heads_for_tokens`."""
    group = parallel_state.get_context_parallel_group()
    by_receiver = x.unflatten(0, (group.size(), -1))
    return _exchange(by_receiver, group).movedim(0, -3).flatten(-3, -2)


def _exchange(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[c, ...], entry r for rank r -> [c, ...], entry r from rank r."""
    return all_to_all(group, by_rank.contiguous().flatten(0, 1)).view(by_rank.shape)


def join_scored(values: Tensor, scored: Tensor | None, count: int) -> Tensor:
    """This rank's part of the response tokens' values [n, ...] -> those of all, [count, ...], the same on each rank.

    Args:
        scored: int64 [n], which of all they are; None without context parallelism: all.
        count: response tokens of the micro-batch.
    """
    return values if scored is None else _Join.apply(values, scored, count)


class _Join(torch.autograd.Function):
    """Every rank goes on to compute the whole loss, so a value's gradient is on its own rank: nothing is added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scored: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(scored)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy(0, scored, values)
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())  # one rank's value and zeros
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (scored,) = ctx.saved_tensors
        return grad.index_select(0, scored), None, None
