"""NVFP4: e2m1 in groups of 16 along the input with e4m3 scales, and one fp32 scale a tensor (ModelOpt's layout)."""

import torch

from conversion.quantization.formats import NVFP4_GROUP
from conversion.quantization.fp8 import E4M3_MAX, require_finite

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0..7; code + 8 is the negative
_E2M1_MAX = _VALUES[-1]
_SMALLEST_E4M3 = 2.0**-9


def quantize_nvfp4(
    weight: torch.Tensor, fused_with: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds to the nearest e2m1 value, ties to the even code, of scale x tensor scale.

    Args:
        weight: [out, in], any floating dtype, `in` a multiple of 16.
        fused_with: a weight that shares the tensor's scale (engines fuse gate and up projections).

    Returns:
        Codes uint8 [out, in / 2] (first value in the low nibble); scale e4m3 [out, in / 16] = absmax of the group / 6 /
        tensor scale; tensor scale fp32 [] = absmax of the tensor / (448 x 6).

    Raises:
        QuantizationError: NaN or infinity.
    """
    groups = weight.float().unflatten(1, (-1, NVFP4_GROUP))
    group_absmax = require_finite(groups.abs().amax(-1))
    absmax = group_absmax.max()
    if fused_with is not None:
        absmax = torch.maximum(absmax, require_finite(fused_with.abs().max().float()))
    tensor_scale = absmax / (E4M3_MAX * _E2M1_MAX)
    tensor_scale = torch.where(tensor_scale == 0, 1.0, tensor_scale)
    scale = (group_absmax / _E2M1_MAX / tensor_scale).clamp(_SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _to_codes(groups / (scale.float() * tensor_scale)[..., None]).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, tensor_scale


def dequantize_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """code's value x (scale x tensor scale) in fp32, rounded once to `dtype`; [out, in]."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
    values = table[codes.int()].unflatten(1, (-1, NVFP4_GROUP))
    return (values * (scale.float() * tensor_scale.float())[..., None]).flatten(1).to(dtype)


def _to_codes(values: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_VALUES, device=values.device)
    middles = (table[1:] + table[:-1]) / 2
    # A tie goes to the even code: up from an odd one, so its border lies a hair lower.
    borders = torch.where(torch.arange(7, device=values.device) % 2 == 1, middles.nextafter(table[:-1]), middles)
    codes = torch.bucketize(values.abs(), borders).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3)
