"""The number formats of rollout weights and their entries in config.json, in both directions. No torch.

| format      | element | scale                                                      | quantized                     |
|-------------|---------|------------------------------------------------------------|-------------------------------|
| fp8         | e4m3    | fp32 = absmax / 448 of a block of 128 x 128                | every linear layer of a block |
| mxfp8       | e4m3    | power of two (UE8M0, a byte) of 32 values along the input  | as fp8                        |
| int4        | -7..7   | bf16 = absmax / 7 of `group_size` values along the input   | routed experts                |
| int4_linear | -7..7   | as int4                                                    | as fp8                        |
| nvfp4       | e2m1    | e4m3 of 16 values along the input, times one fp32 a tensor | routed experts                |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Format = Literal["fp8", "mxfp8", "int4", "int4_linear", "nvfp4"]
FORMATS: tuple[Format, ...] = get_args(Format)

FP8_BLOCK = 128
MXFP8_GROUP = 32
NVFP4_GROUP = 16
DEFAULT_INT4_GROUP = 128

# What stays in high precision beside the experts, in the two pattern languages of the engines.
_KEPT_BESIDE_EXPERTS = (
    "lm_head",
    r"re:.*self_attn\..*",
    r"re:.*shared_expert.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj$",
    r"re:.*(mlp|block_sparse_moe)\.gate$",
    r"re:.*\.eh_proj$",
    r"re:.*\.shared_head\.head$",
)
_KEPT_BESIDE_EXPERTS_GLOB = (
    "lm_head",
    "*.self_attn*",
    "*.shared_expert*",
    "*.mlp.gate_proj",
    "*.mlp.up_proj",
    "*.mlp.gate_up_proj",
    "*.mlp.down_proj",
    "*.mlp.gate",
    "*.block_sparse_moe.gate",
    "*.eh_proj",
    "*.shared_head.head",
)


class QuantizationError(ValueError):
    """Weights that can't be had in a format; names tensor, value, rule and option."""


@dataclass(frozen=True)
class FormatSpec:
    """A format with its group size, which is free in the INT4 formats alone."""

    format: Format
    group_size: int = 0  # values along the input that share a scale; 0 for fp8, whose blocks are squares

    @property
    def is_int4(self) -> bool:
        return self.format in ("int4", "int4_linear")

    def __str__(self) -> str:
        return f"{self.format} in groups of {self.group_size}" if self.group_size else self.format


def format_spec(format: str, group_size: int) -> FormatSpec:
    """The spec of `quantize.format` and `quantize.group_size` (read for INT4 alone).

    Raises:
        QuantizationError: no such format.
    """
    groups: dict[str, int] = {
        "fp8": 0,
        "mxfp8": MXFP8_GROUP,
        "int4": group_size,
        "int4_linear": group_size,
        "nvfp4": NVFP4_GROUP,
    }
    if format not in groups:
        raise QuantizationError(f"quantize.format {format!r} is unknown; choose one of none, {', '.join(FORMATS)}")
    return FormatSpec(format, groups[format])  # type: ignore[arg-type]  # a key of groups is a Format


def require_format(entry: Mapping[str, Any] | None, format: str, group_size: int) -> None:
    """Proves that a folder is in the format of quantize.format ("none" included) and quantize.group_size.

    Raises:
        QuantizationError: training would round to another grid than the folder's; names both.
    """
    held = spec_of_entry(entry)
    wanted = None if format == "none" else format_spec(format, group_size)
    if held != wanted:
        raise QuantizationError(
            f"the rollout weights are {held or 'not quantized'}, but quantize.format and quantize.group_size ask for "
            f"{wanted or 'none'}: the engine would hold other values than training sees"
        )


def config_entry(spec: FormatSpec, kept: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json.

    Args:
        kept: modules with a weight matrix that stays in high precision, e.g. `lm_head`.
    """
    if spec.format == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": sorted(kept),
        }
    if spec.format == "mxfp8":
        return {
            "quant_method": "mxfp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, MXFP8_GROUP],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": sorted(kept),
        }
    if spec.format == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": NVFP4_GROUP,
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": list(_KEPT_BESIDE_EXPERTS_GLOB),
        }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": spec.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(_KEPT_BESIDE_EXPERTS) if spec.format == "int4" else sorted(kept),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def spec_of_entry(entry: Mapping[str, Any] | None) -> FormatSpec | None:
    """The format of a folder by its `quantization_config`; None where there is none.

    Recognises what `config_entry` writes, and the FP8 checkpoints that DeepSeek and Qwen publish.

    Raises:
        QuantizationError: any other format.
    """
    if not entry:
        return None
    method = entry.get("quant_method")
    if method in ("fp8", "mxfp8") and entry.get("fmt", "e4m3") == "e4m3":
        block = entry.get("weight_block_size")
        if method == "fp8" and block == [FP8_BLOCK, FP8_BLOCK]:
            return FormatSpec("fp8")
        if block == [1, MXFP8_GROUP]:
            return FormatSpec("mxfp8", MXFP8_GROUP)
    if method == "modelopt" and entry.get("quant_algo") == "NVFP4" and entry.get("group_size") == NVFP4_GROUP:
        return FormatSpec("nvfp4", NVFP4_GROUP)
    if method == "compressed-tensors" and entry.get("format") == "pack-quantized":
        groups = list(entry.get("config_groups", {}).values())
        weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
        scheme = {key: weights.get(key) for key in ("num_bits", "type", "symmetric", "strategy")}
        if scheme == {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}:
            keeps_attention = any("self_attn" in module for module in entry.get("ignore", ()))
            return FormatSpec("int4" if keeps_attention else "int4_linear", weights["group_size"])
    found = {key: value for key, value in entry.items() if isinstance(value, str | int | list) and key != "ignore"}
    raise QuantizationError(
        f"the checkpoint is quantized in a format that is not supported: {found}. Supported are FP8 (e4m3) in blocks "
        "of 128 x 128, MXFP8, NVFP4 and symmetric group-wise INT4 (pack-quantized); start from unquantized weights"
    )
