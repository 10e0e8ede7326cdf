"""INT4: symmetric groups along the input, packed as compressed-tensors' `pack-quantized` reads them.

The scale is rounded to bf16 before anything is divided by it. So there is one grid: what training sees through
`fake_quantize_int4` equals what the engine unpacks, bit for bit.
"""

from typing import Any

import torch

from conversion.quantization.formats import QuantizationError
from conversion.quantization.fp8 import require_finite

_MAX = 7  # -8 stays unused, so that the grid is symmetric
_OFFSET = 8  # stored value = q + 8
_NIBBLES = 8  # of an int32


def quantize_int4(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds to the nearest of the 15 values of each group's scale, bf16(absmax / 7).

    Args:
        weight: [out, in], any floating dtype.
        group_size: values along the input that share a scale; must divide `in`.

    Returns:
        Packed int32 [out, ceil(in / 8)] (first value in the lowest nibble, q + 8), scale bf16 [out, in / group_size],
        and the shape, int64 [2].

    Raises:
        QuantizationError: the group size does not divide the width, or there is NaN or infinity.
    """
    q, scale = _round_to_grid(weight, group_size)
    require_finite(scale)
    nibbles = q.to(torch.int32).flatten(1) + _OFFSET
    nibbles = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[1] % _NIBBLES)).unflatten(1, (-1, _NIBBLES))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=nibbles.device)
    packed = (nibbles << shifts).sum(-1, dtype=torch.int32)  # disjoint bits: the sum is their union
    return packed, scale, torch.tensor(weight.shape)


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q x scale (exact in fp32), rounded once to `dtype`; [out, in] as `shape` says."""
    rows, columns = shape.tolist()
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed[:, :, None] >> shifts) & 0xF
    q = nibbles.flatten(1)[:rows, :columns] - _OFFSET
    return _restore(q.unflatten(1, (scale.shape[1], -1)), scale, dtype)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, group_size: int, stored: torch.dtype) -> torch.Tensor:
        return _restore(*_round_to_grid(weight.to(stored), group_size), weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


def fake_quantize_int4(weight: torch.Tensor, group_size: int, stored: torch.dtype | None = None) -> torch.Tensor:
    """`weight` [out, in] rounded to the grid of `quantize_int4`, in its own dtype; the gradient passes unchanged
    (straight-through estimator, Bengio et al. 2013), for quantization-aware training.

    `stored` is the dtype that the weight has when `quantize_int4` gets it; None: its own.
    """
    return _FakeQuantize.apply(weight, group_size, stored or weight.dtype)


def _round_to_grid(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q fp32 [out, groups, group_size] of whole values in -7..7, and scale bf16 [out, groups]."""
    if weight.shape[1] % group_size:
        raise QuantizationError(
            f"its input width {weight.shape[1]} is no multiple of the group size {group_size} (quantize.group_size)"
        )
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1) / _MAX).bfloat16()
    scale = torch.where(scale == 0, 1.0, scale)  # a group of zeros comes back as zeros
    return (groups / scale.float()[..., None]).round_().clamp_(-_MAX, _MAX), scale


def _restore(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q * scale.float()[..., None]).flatten(1).to(dtype)
