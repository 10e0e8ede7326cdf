"""FP8: e4m3 in blocks of 128 x 128, each with an fp32 scale (the format of DeepSeek-V3's checkpoints)."""

import torch

from conversion.quantization.formats import FP8_BLOCK, QuantizationError

E4M3_MAX = 448.0


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds to the nearest e4m3 value of each block's scale, absmax / 448.

    A block of zeros (or one so small that its scale would be 0) has scale 1, so that it comes back as zeros.

    Args:
        weight: [out, in], any floating dtype; blocks at the edges may be smaller.

    Returns:
        e4m3 [out, in], and fp32 [ceil(out / 128), ceil(in / 128)], by which a block is multiplied to restore it.

    Raises:
        QuantizationError: NaN or infinity.
    """
    q, scale_inv = quantize_blocks(weight)
    require_finite(scale_inv)
    return q, scale_inv


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_fp8` without the look at the values, for which a GPU would have to wait: a block with NaN or infinity
    has a scale that is not finite, and NaN where that was."""
    blocks = _to_blocks(weight.float())
    scale_inv = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    scale_inv = torch.where(scale_inv == 0, 1.0, scale_inv)
    # Clamped because a subnormal scale has few bits, and e4m3 has no infinity: too large a value would become NaN.
    q = (blocks / scale_inv[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return _from_blocks(q, weight.shape), scale_inv


def dequantize_fp8(q: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q x scale in fp32, rounded once to `dtype`; [out, in]."""
    blocks = _to_blocks(q.float())
    return _from_blocks(blocks * scale_inv.float()[:, None, :, None], q.shape).to(dtype)


def require_finite(absmax: torch.Tensor) -> torch.Tensor:
    """`absmax` itself (NaN wins in a maximum, so it shows every non-finite value).

    Raises:
        QuantizationError: NaN or infinity.
    """
    if not absmax.isfinite().all():
        raise QuantizationError("it holds NaN or infinity")
    return absmax


def _to_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [rows of blocks, 128, columns of blocks, 128], zeros at ragged edges."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]].contiguous()
