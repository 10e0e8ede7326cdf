"""FP8 training: all three products of a linear layer in e4m3, forward and backward (DeepSeek-V3, section 3.3)."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conversion.quantization.formats import FP8_BLOCK
from miles_core.precision.fp8 import Fp8Matrix, multiply


class Fp8Products:
    """With x [m, k], w [n, k] and the output's gradient g [m, n], each operand in blocks along what is summed over:

        y  = x w^T    x in 1 x 128 along k, w in 128 x 128
        dx = g w      g in 1 x 128 along n, w the same numbers
        dw = g^T x    both in 1 x 128 along m

    Weights, their gradients and everything between the products keep their dtype.
    """

    def __init__(self) -> None:
        self._non_finite: Tensor | int = 0  # on the device, so that counting waits for nothing

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        keep = torch.is_grad_enabled() and weight.requires_grad
        return _Fp8Linear.apply(x.flatten(0, -2), weight, self, keep).view(*x.shape[:-1], len(weight))

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """One product an expert: torch has no grouped one with blocks of this kind."""
        sizes = [end - start for start, end in pairwise([0, *ends.tolist()])]
        parts = zip(rows.split(sizes), weight.unbind(), strict=True)
        return torch.cat([self.linear(part, w) for part, w in parts])

    def check(self, name: str, weight: Tensor) -> None:
        if weight.is_cuda and (weight.shape[-1] % FP8_BLOCK or weight.shape[-2] % FP8_BLOCK):
            raise ValueError(
                f"{name} has {list(weight.shape)} on this rank; on a GPU trainer.fp8=true takes multiples of "
                f"{FP8_BLOCK}: set it to false, or lower trainer.parallel.tensor"
            )

    def quantized(self, matrix: Fp8Matrix) -> Fp8Matrix:
        """`matrix`, counted where it has blocks that are not finite."""
        self._non_finite = self._non_finite + (~matrix.scale.isfinite()).sum()
        return matrix

    def take_non_finite(self) -> int:
        """Blocks with NaN or infinity since the last call."""
        count, self._non_finite = int(self._non_finite), 0
        return count


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Fp8Products, keep: bool) -> Tensor:
        padded = _padded(x)
        w = products.quantized(Fp8Matrix.of_weight(weight))
        if keep:  # for dw, in half the memory that x itself takes
            along_tokens = Fp8Matrix.of_rows(padded.t().contiguous())
            ctx.save_for_backward(along_tokens.values, along_tokens.scale, w.values, w.scale)
            ctx.products, ctx.rows, ctx.dtype = products, len(x), weight.dtype
        return multiply(products.quantized(Fp8Matrix.of_rows(padded)), w, x.dtype)[: len(x)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x_values, x_scale, w_values, w_scale = ctx.saved_tensors
        g = _padded(grad)
        grad_x = None
        if ctx.needs_input_grad[0]:
            by_row = ctx.products.quantized(Fp8Matrix.of_rows(g))
            w = Fp8Matrix(w_values, w_scale, FP8_BLOCK).transposed()
            grad_x = multiply(by_row, w, grad.dtype)[: ctx.rows]
        along_tokens = Fp8Matrix.of_rows(g.t().contiguous())
        return grad_x, multiply(along_tokens, Fp8Matrix(x_values, x_scale, 1), ctx.dtype), None, None


def _padded(x: Tensor) -> Tensor:
    """On a GPU rows are filled up with zeros to a multiple of 128, which its kernels need."""
    missing = -len(x) % FP8_BLOCK if x.is_cuda else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x
