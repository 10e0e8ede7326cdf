"""One interface to every format: used by the folder converter, the weight push and the export."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conversion.quantization.formats import FormatSpec, QuantizationError, config_entry, format_spec, spec_of_entry
from conversion.quantization.fp8 import dequantize_fp8, quantize_fp8
from conversion.quantization.int4 import dequantize_int4, quantize_int4
from conversion.quantization.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from conversion.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from conversion.quantization.policy import fused_with, group_fault

_WEIGHT = "weight"


@dataclass(frozen=True)
class Codec:
    """A format: weight `X.weight` is stored as `X.{suffix}` for each of `suffixes`."""

    spec: FormatSpec
    suffixes: tuple[str, ...]
    _quantize: Callable[..., tuple[torch.Tensor, ...]]
    _dequantize: Callable[..., torch.Tensor]
    _shares_scale: bool = False  # gate and up projections have one tensor scale

    def encode(
        self, name: str, weight: torch.Tensor, fused_weight: torch.Tensor | None = None
    ) -> list[tuple[str, torch.Tensor]]:
        """The stored tensors of the weight `name`, [out, in].

        Args:
            fused_weight: the weight `shares_scale_with(name)`, where that is not None.

        Raises:
            QuantizationError: the width does not suit the group size, or NaN or infinity; names the tensor.
        """
        if fault := group_fault(weight.shape, self.spec):
            raise QuantizationError(f"tensor {name} can't be quantized: {fault}")
        if self.shares_scale_with(name) is not None and fused_weight is None:
            raise QuantizationError(f"tensor {name} shares its scale with {self.shares_scale_with(name)}: give both")
        try:
            parts = self._quantize(weight) if fused_weight is None else self._quantize(weight, fused_weight)
        except QuantizationError as error:
            raise QuantizationError(f"tensor {name} can't be quantized: {error}") from error
        return list(zip(self.stored_names(name), parts, strict=True))

    def decode(self, name: str, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight `name`, [out, in] in `dtype`, from its stored tensors by their names."""
        return self._dequantize(*(stored[part] for part in self.stored_names(name)), dtype=dtype)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that `encode` makes of the weight `name`."""
        if not name.endswith(f".{_WEIGHT}"):
            raise QuantizationError(f"tensor {name} is no weight of a linear layer")
        return tuple(name.removesuffix(_WEIGHT) + suffix for suffix in self.suffixes)

    def shares_scale_with(self, name: str) -> str | None:
        """Another weight that must be known to encode `name`."""
        return fused_with(name) if self._shares_scale else None

    def quantized_in(self, names: Collection[str]) -> frozenset[str]:
        """The weights that are stored quantized among the tensors `names` of a folder.

        Raises:
            QuantizationError: stored tensors of a weight are missing.
        """
        there = frozenset(names)
        sign = f".{self.suffixes[1]}"
        weights = frozenset(name.removesuffix(sign) + f".{_WEIGHT}" for name in there if name.endswith(sign))
        if missing := sorted(part for weight in weights for part in self.stored_names(weight) if part not in there):
            raise QuantizationError(f"{len(missing)} tensors of quantized weights are missing, the first {missing[0]}")
        return weights

    def weight_shape(self, stored: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Shape of a weight, from the shapes of its stored tensors in the order of `suffixes`."""
        out, width = stored[0]
        if self.spec.is_int4 or self.spec.format == "nvfp4":
            width = stored[1][1] * self.spec.group_size
        return out, width

    def hf_config(self, kept: Sequence[str] = ()) -> dict[str, Any]:
        """`quantization_config` of config.json; `kept`: linear modules that stay in high precision."""
        return config_entry(self.spec, kept)


def codec_for(format: str, group_size: int) -> Codec | None:
    """The codec of `quantize.format`; None for "none"."""
    return None if format == "none" else _codec(format_spec(format, group_size))


def codec_from_config(quantization_config: Mapping[str, Any] | None) -> Codec | None:
    """The codec of a folder by the entry in its config.json; None for a folder that is not quantized.

    Raises:
        QuantizationError: a format that is not supported.
    """
    spec = spec_of_entry(quantization_config)
    return None if spec is None else _codec(spec)


def _codec(spec: FormatSpec) -> Codec:
    if spec.format == "fp8":
        return Codec(spec, ("weight", "weight_scale_inv"), quantize_fp8, dequantize_fp8)
    if spec.format == "mxfp8":
        return Codec(spec, ("weight", "weight_scale_inv"), quantize_mxfp8, dequantize_mxfp8)
    if spec.format == "nvfp4":
        names = ("weight", "weight_scale", "weight_scale_2")
        return Codec(spec, names, quantize_nvfp4, dequantize_nvfp4, _shares_scale=True)
    quantize = partial(quantize_int4, group_size=spec.group_size)
    return Codec(spec, ("weight_packed", "weight_scale", "weight_shape"), quantize, dequantize_int4)
