"""Which tensors are quantized: the only list, of exact names. No torch.

Never quantized: norms, embeddings, the head, the router, projections of an MTP layer's inputs, biases.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from conversion.quantization.formats import Format, FormatSpec, QuantizationError, format_spec, spec_of_entry

_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

# Names inside `model.layers.N.`; a star stands for an expert's number.
_EXPERTS = frozenset(
    [f"mlp.experts.*.{part}.weight" for part in _MLP]
    + [f"block_sparse_moe.experts.*.{part}.weight" for part in ("w1", "w2", "w3")]
)
_LINEAR = _EXPERTS | frozenset(
    [f"self_attn.{part}.weight" for part in (*_ATTENTION, *_LATENT_ATTENTION, "indexer.wq_b")]
    + [f"{mlp}.{part}.weight" for mlp in ("mlp", "mlp.shared_experts", "mlp.shared_expert") for part in _MLP]
)
QUANTIZED: dict[Format, frozenset[str]] = {
    "fp8": _LINEAR,
    "mxfp8": _LINEAR,
    "int4": _EXPERTS,
    "int4_linear": _LINEAR,
    "nvfp4": _EXPERTS,
}

_EMBEDDINGS = frozenset({"model.embed_tokens.weight", "embed_tokens.weight"})
# Matrices that stay in every format. A matrix in neither list is an error, so that none is forgotten in silence.
_KEPT = _EMBEDDINGS | {
    "lm_head.weight",
    "mlp.gate.weight",
    "mlp.shared_expert_gate.weight",
    "block_sparse_moe.gate.weight",
    "eh_proj.weight",
    "shared_head.head.weight",
    "self_attn.indexer.wk.weight",
    "self_attn.indexer.weights_proj.weight",
}

# Gate and up projection of one MLP, which engines fuse: they need one scale where a format has one a tensor.
_FUSED_WITH = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}

Shape = Sequence[int]


def quantized_names(shapes: Mapping[str, Shape], format: Format) -> frozenset[str]:
    """The names in `shapes` (Hugging Face name -> shape, of unquantized weights) that `format` quantizes.

    Raises:
        QuantizationError: a matrix that this list does not know.
    """
    quantized, unknown = set(), []
    for name, shape in shapes.items():
        pattern = _pattern(name)
        if pattern in QUANTIZED[format] and len(shape) == 2:
            quantized.add(name)
        elif len(shape) > 1 and pattern not in _LINEAR | _KEPT:
            unknown.append(f"{name} {list(shape)}")
    if unknown:
        raise QuantizationError(
            f"{len(unknown)} matrices are neither in the list of what is quantized nor of what stays "
            f"(conversion/quantization/policy.py): {', '.join(unknown[:5])}"
        )
    return frozenset(quantized)


def kept_modules(shapes: Mapping[str, Shape], format: Format) -> list[str]:
    """Linear modules of `shapes` whose matrix stays in high precision (an embedding is no linear module)."""
    kept = {name for name, shape in shapes.items() if len(shape) == 2} - quantized_names(shapes, format)
    return sorted(name.removesuffix(".weight") for name in kept if _pattern(name) not in _EMBEDDINGS)


def fused_with(name: str) -> str | None:
    """The other of an MLP's gate and up projection; None for any other tensor."""
    *path, part, kind = name.split(".")
    return ".".join([*path, _FUSED_WITH[part], kind]) if part in _FUSED_WITH else None


def group_fault(shape: Shape, spec: FormatSpec) -> str | None:
    """Why a weight [out, in] can't be cut into groups along its input; None if it can."""
    if not spec.group_size or shape[-1] % spec.group_size == 0:
        return None
    option = "quantize.group_size" if spec.is_int4 else "quantize.format"
    return f"its input width {shape[-1]} is no multiple of the group size {spec.group_size} of {spec.format} ({option})"


def preflight_quantize(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], format: str, group_size: int
) -> list[str]:
    """Why the model can't have the rollout format, from its headers alone; [] if it can.

    Args:
        config: config.json.
        shapes: Hugging Face name -> shape of every tensor.
        format, group_size: quantize.format ("none" included) and quantize.group_size.
    """
    try:
        source = spec_of_entry(config.get("quantization_config"))
        if format == "none":
            return []
        spec = format_spec(format, group_size)
        if source is not None and source.format not in ("fp8", "mxfp8"):
            return [
                f"the model's weights are {source.format} already, and quantize.format={format} would round them a "
                "second time: start from unquantized weights, or set quantize.format=none"
            ]
        weights = {name: shape for name, shape in shapes.items() if not name.endswith("_scale_inv")}
        names = sorted(quantized_names(weights, spec.format))
    except QuantizationError as error:
        return [str(error)]
    if not names:
        architecture = (config.get("architectures") or ["the model"])[0]
        return [
            f"quantize.format={format} packs routed experts only, and {architecture} has none: "
            "choose quantize.format=int4_linear, fp8 or none"
        ]
    faulty = [name for name in names if group_fault(shapes[name], spec)]
    if not faulty:
        return []
    others = f" (so are {len(faulty) - 1} others)" if len(faulty) > 1 else ""
    return [f"tensor {faulty[0]} can't be quantized{others}: {group_fault(shapes[faulty[0]], spec)}"]


def _pattern(name: str) -> str:
    """`mlp.experts.*.up_proj.weight` of `model.layers.3.mlp.experts.17.up_proj.weight`."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdigit():
        return ".".join("*" if part.isdigit() else part for part in parts[3:])
    return name
