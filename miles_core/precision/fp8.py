"""Matrices of e4m3 numbers with a scale for each block, and their product.

Two kinds of blocks, those of DeepSeek-V3 (arXiv 2412.19437, section 3.3): 1 x 128 along the contracted dimension, for
activations and gradients, and 128 x 128, for weights, as in the checkpoints of quantize.format=fp8. Scales are fp32,
absmax / 448.

On a Hopper GPU the product is one of its FP8 kernels. A CPU multiplies the same rounded numbers in fp32, so that the
two differ by how sums are rounded alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from conversion.quantization.formats import FP8_BLOCK
from conversion.quantization.fp8 import E4M3_MAX, quantize_blocks
from miles_core.device import compute_capability

_HOPPER = (9, 0)


@dataclass(frozen=True)
class Fp8Matrix:
    """values * scale of their block.

    A block with NaN or infinity has a scale that is not finite, and every product with it is NaN: nothing is clipped.
    """

    values: Tensor  # e4m3 [rows, k], contiguous
    scale: Tensor  # fp32 [ceil(rows / row_block), ceil(k / 128)]
    row_block: int  # 1 or 128

    @classmethod
    def of_rows(cls, x: Tensor) -> Self:
        """[rows, k] in blocks of 1 x 128."""
        round_rows = _compiled_round_rows() if x.is_cuda and x.numel() else _round_rows
        return cls(*round_rows(x), row_block=1)

    @classmethod
    def of_weight(cls, weight: Tensor) -> Self:
        """[n, k] in blocks of 128 x 128, by the codec of the rollout's weights."""
        return cls(*quantize_blocks(weight), row_block=FP8_BLOCK)

    def transposed(self) -> "Fp8Matrix":
        """Of square blocks alone: the same numbers, [k, n]."""
        assert self.row_block == FP8_BLOCK
        return Fp8Matrix(self.values.t().contiguous(), self.scale.t(), FP8_BLOCK)

    def decoded(self) -> Tensor:
        """fp32 [rows, k]."""
        rows, k = self.values.shape
        scale = self.scale.repeat_interleave(self.row_block, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :k]
        return self.values.float() * scale


def multiply(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """a [m, k] times b [n, k] transposed, summed in fp32 -> `dtype` [m, n].

    On a GPU m, n and k are multiples of 128; `a` has blocks of 1 x 128.
    """
    if not a.values.numel():  # an expert that no token chose
        return torch.zeros(len(a.values), len(b.values), dtype=dtype, device=a.values.device)
    if not a.values.is_cuda:
        return (a.decoded() @ b.decoded().t()).to(dtype)
    kinds = {1: F.ScalingType.BlockWise1x128, FP8_BLOCK: F.ScalingType.BlockWise128x128}
    return F.scaled_mm(
        a.values,
        b.values.t(),
        _cublas_scale(a),
        kinds[a.row_block],
        _cublas_scale(b),
        kinds[b.row_block],
        output_dtype=dtype,
    )


def require_fp8_kernels() -> None:
    """Raises ValueError on a GPU that has none of these products."""
    found = compute_capability()
    if found is None:
        return
    if found != _HOPPER:
        raise ValueError(
            f"trainer.fp8=true needs a GPU of compute capability 9.0 (H100, H200), found {found[0]}.{found[1]}: "
            "set it to false"
        )
    if not hasattr(F, "scaled_mm"):
        raise ValueError(f"trainer.fp8=true needs torch 2.10 or later on a GPU, found {torch.__version__}")


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    k = x.shape[1]
    blocks = F.pad(x.float(), (0, -k % FP8_BLOCK)).unflatten(1, (-(-k // FP8_BLOCK), FP8_BLOCK))
    scale = blocks.abs().amax(-1) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)  # a block of zeros comes back as zeros
    # Clamped because a subnormal scale has few bits. NaN stays, and infinity / infinity is NaN.
    values = (blocks / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, :k].contiguous(), scale


@functools.cache
def _compiled_round_rows() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One pass over memory instead of six."""
    return torch.compile(_round_rows, dynamic=True)


def _cublas_scale(matrix: Fp8Matrix) -> Tensor:
    """Scales as cuBLAS reads them: 1 x 128 as [rows, k / 128] with rows next to each other in memory; 128 x 128 as
    [k / 128, rows / 128], likewise by column, with k / 128 padded to a multiple of 4."""
    if matrix.row_block == 1:
        return matrix.scale.t().contiguous().t()
    return F.pad(matrix.scale, (0, -matrix.scale.shape[1] % 4)).contiguous().t()
