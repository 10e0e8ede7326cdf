"""MXFP8: e4m3 in groups of 32 along the input, each with a power of two as its scale (OCP MX v1.0)."""

import torch

from conversion.quantization.formats import MXFP8_GROUP
from conversion.quantization.fp8 import E4M3_MAX, require_finite

_BIAS = 127  # UE8M0: byte b stands for 2 ** (b - 127)


def quantize_mxfp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds to the nearest e4m3 value of each group's scale, the least power of two of at least absmax / 448.

    Rounding the scale up lets no value saturate (the MX specification's floor would cut up to an eighth off the
    largest); this is the choice of NVIDIA's recipes. A group of zeros has scale 1.

    Args:
        weight: [out, in], any floating dtype, `in` a multiple of 32.

    Returns:
        e4m3 [out, in], and scale bytes uint8 [out, in / 32].

    Raises:
        QuantizationError: NaN or infinity.
    """
    groups = weight.float().unflatten(1, (-1, MXFP8_GROUP))
    absmax = require_finite(groups.abs().amax(-1))
    mantissa, exponent = torch.frexp(absmax / E4M3_MAX)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-_BIAS, _BIAS)
    exponent = torch.where(absmax == 0, 0, exponent)
    scale = (exponent + _BIAS).to(torch.uint8)
    scaled = (groups / _value(scale)[..., None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(1), scale


def dequantize_mxfp8(q: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q x scale (exact in fp32, but for the smallest), rounded once to `dtype`; [out, in]."""
    return (q.float().unflatten(1, (-1, MXFP8_GROUP)) * _value(scale_inv)[..., None]).flatten(1).to(dtype)


def _value(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.float8_e8m0fnu).float()
