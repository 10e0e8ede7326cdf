"""Arithmetic on packed response tokens that a masked entry can never enter.

A micro-batch's response tokens lie one after another in 1-D tensors; `mask` (bool) marks the trainable ones and
`sequence_ids` (int64) says which sample each belongs to. Masked values are replaced *before* any arithmetic: they may
be anything, and 0 * inf would be NaN in the loss or, unseen, in the gradient.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: beyond any useful ratio, and its square is still finite in float32


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 at masked entries; nor does a gradient flow into those."""
    return torch.where(mask, values, 0.0)


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """sum_t weights_t * values_t over trainable tokens; a scalar."""
    return (masked(values, mask) * masked(weights, mask)).sum()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -20, 20)): finite even for an infinite log-ratio; no gradient beyond the bounds."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum over the trainable tokens of each sequence, given back to each of its tokens; shape of `values`."""
    if not sequence_ids.numel():
        return values
    sums = values.new_zeros(int(sequence_ids.max()) + 1).index_add(0, sequence_ids, masked(values, mask))
    return sums[sequence_ids]


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """As `sequence_sum`, the mean; 0 for a sequence without trainable tokens."""
    count = sequence_sum(mask.to(values.dtype), mask, sequence_ids)
    return sequence_sum(values, mask, sequence_ids) / count.clamp(min=1)
