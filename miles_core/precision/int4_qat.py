"""Quantization-aware training: products with the weights that an INT4 rollout engine holds."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from conversion.quantization.formats import FormatSpec
from conversion.quantization.int4 import fake_quantize_int4
from miles_core.precision.products import PlainProducts


class Int4AwareProducts(PlainProducts):
    """Weights are rounded to the grid of the rollout's codec; the gradient goes to the unrounded ones as it is.

    Args:
        spec: the rollout's format: routed experts (int4), or every linear layer (int4_linear).
        stored: number format of these weights in the model's folder. A push rounds them to it before it quantizes.
    """

    def __init__(self, spec: FormatSpec, stored: torch.dtype) -> None:
        self._group_size, self._stored = spec.group_size, stored
        self._all_linear = spec.format == "int4_linear"

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().linear(x, self._as_rolled_out(weight) if self._all_linear else weight)

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        # Groups run along the input, so gate and up, or all experts, may be stacked.
        rounded = self._as_rolled_out(weight.flatten(0, 1)).view_as(weight)
        return super().grouped(rows, rounded, ends)

    def _as_rolled_out(self, weight: Tensor) -> Tensor:
        return fake_quantize_int4(weight, self._group_size, self._stored)


def stored_dtype(quantized: Collection[str], dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The one number format in which the model's folder keeps the weights that will be quantized.

    Raises:
        ValueError: they have several.
    """
    found = {dtypes[name]: name for name in quantized}
    if len(found) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise ValueError(f"trainer.qat takes a model whose linear weights have one number format, but {listed}")
    return next(iter(found))
