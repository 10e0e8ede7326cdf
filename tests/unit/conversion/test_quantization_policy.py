"""Which tensors are quantized, in every family, and what is refused before any tensor is read."""

import math
import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import transformers
from tiny_models import TINY, saved_config

from conversion.families import geometry_from_config, rules_for
from conversion.quantization.formats import (
    FORMATS,
    QuantizationError,
    config_entry,
    format_spec,
    require_format,
    spec_of_entry,
)
from conversion.quantization.policy import kept_modules, preflight_quantize, quantized_names

Shapes = dict[str, tuple[int, ...]]


def family_shapes(family: str) -> Shapes:
    """Every tensor of a tiny model, MTP layers included."""
    geometry = geometry_from_config(saved_config(family))
    rules = rules_for(geometry, geometry.mtp_num_layers)
    return {name: shape for rule in rules for name, shape in rule.hf_shapes().items()}


LINEAR = {
    "model.layers.0.self_attn.q_proj.weight": (64, 32),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (64, 32),
    "model.layers.0.mlp.gate_proj.weight": (64, 32),
    "model.layers.0.mlp.shared_experts.up_proj.weight": (64, 32),
    "model.layers.0.mlp.shared_expert.down_proj.weight": (64, 32),
    "model.layers.0.self_attn.indexer.wq_b.weight": (64, 32),
}
EXPERTS = {
    "model.layers.11.mlp.experts.7.gate_proj.weight": (64, 32),
    "model.layers.11.mlp.experts.107.down_proj.weight": (64, 32),
    "model.layers.2.block_sparse_moe.experts.0.w3.weight": (64, 32),
}
NEVER = {
    "model.embed_tokens.weight": (64, 32),
    "lm_head.weight": (64, 32),
    "model.norm.weight": (32,),
    "model.layers.0.mlp.gate.weight": (64, 32),
    "model.layers.0.mlp.gate.e_score_correction_bias": (64,),
    "model.layers.0.mlp.shared_expert_gate.weight": (1, 32),
    "model.layers.0.block_sparse_moe.gate.weight": (64, 32),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.self_attn.q_norm.weight": (64,),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.4.eh_proj.weight": (32, 64),
    "model.layers.4.embed_tokens.weight": (64, 32),
    "model.layers.4.shared_head.head.weight": (64, 32),
    "model.layers.4.shared_head.norm.weight": (32,),
}


@pytest.mark.parametrize(
    ("format", "expected"),
    [("fp8", LINEAR | EXPERTS), ("mxfp8", LINEAR | EXPERTS), ("int4", EXPERTS), ("nvfp4", EXPERTS)],
)
def test_exact_names(format, expected: Shapes) -> None:
    assert quantized_names(LINEAR | EXPERTS | NEVER, format) == expected.keys()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gates_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight.extra",
        "vision.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
    ],
)
def test_unknown_matrix_is_never_skipped_in_silence(name: str) -> None:
    with pytest.raises(QuantizationError, match=re.escape(name)):
        quantized_names({name: (64, 32)}, "fp8")


@pytest.mark.parametrize("family", TINY)
def test_every_matrix_of_every_family_is_known(family: str) -> None:
    shapes = family_shapes(family)
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    kept = {name.split(".")[-2] for name in matrices - quantized_names(shapes, "fp8")}
    assert kept <= {"embed_tokens", "lm_head", "gate", "eh_proj", "head"}
    experts = {name for name in matrices if ".experts." in name}
    assert quantized_names(shapes, "int4") == experts == quantized_names(shapes, "nvfp4")
    assert quantized_names(shapes, "fp8") > experts


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", TINY)
def test_engines_are_told_the_same(family: str, format) -> None:
    """The patterns in config.json match exactly the linear modules that are not quantized."""
    shapes = family_shapes(family)
    quantized = {name.removesuffix(".weight") for name in quantized_names(shapes, format)}
    kept = kept_modules(shapes, format)
    assert not quantized & set(kept)
    entry = config_entry(format_spec(format, 32), kept)
    patterns = entry.get("ignore", entry.get("modules_to_not_convert"))

    def is_ignored(module: str) -> bool:
        return any(
            re.match(pattern[3:], module) if pattern.startswith("re:") else fnmatch(module, pattern)
            for pattern in patterns
        )

    assert [module for module in kept if not is_ignored(module)] == []
    assert [module for module in quantized if is_ignored(module)] == []


@pytest.mark.parametrize("format", FORMATS)
def test_config_entry_is_recognised(format) -> None:
    spec = format_spec(format, 64)
    assert spec_of_entry(config_entry(spec, ["lm_head"])) == spec


@pytest.mark.parametrize(
    ("entry", "format"),
    [
        (None, None),
        ({}, None),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            "fp8",
        ),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "fp8"),
    ],
)
def test_published_checkpoints_are_recognised(entry, format) -> None:
    spec = spec_of_entry(entry)
    assert (spec.format if spec else None) == format


INT4_ENTRY = config_entry(format_spec("int4", 32), [])
ASYMMETRIC = {
    **INT4_ENTRY,
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}}},
}


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        ASYMMETRIC,
    ],
)
def test_other_formats_are_refused_by_name(entry) -> None:
    with pytest.raises(QuantizationError, match=entry["quant_method"]):
        spec_of_entry(entry)


def config(**changes) -> dict:
    return {"architectures": ["Qwen3MoeForCausalLM"], **changes}


FP8_ENTRY = config_entry(format_spec("fp8", 0), [])


@pytest.mark.parametrize(
    ("changes", "shapes", "format", "group_size", "words"),
    [
        ({}, LINEAR | EXPERTS | NEVER, "int4", 32, []),
        ({}, LINEAR | NEVER, "none", 128, []),
        ({}, LINEAR | NEVER, "fp8", 128, []),
        ({}, LINEAR | NEVER, "int4", 32, ["quantize.format=int4", "Qwen3MoeForCausalLM has none", "fp8 or none"]),
        (
            {},
            EXPERTS,
            "int4",
            128,
            ["input width 32", "128 of int4", "quantize.group_size", "2 others"],
        ),
        ({}, LINEAR, "int3", 128, ["quantize.format 'int3'", "int4"]),
        ({"quantization_config": FP8_ENTRY}, LINEAR, "fp8", 128, []),
        ({"quantization_config": FP8_ENTRY}, LINEAR, "none", 128, []),
        ({"quantization_config": INT4_ENTRY}, EXPERTS, "fp8", 128, ["are int4 already", "quantize.format=fp8"]),
        ({"quantization_config": {"quant_method": "awq"}}, EXPERTS, "none", 128, ["awq", "not supported"]),
        ({}, {"model.layers.0.conv.weight": (4, 4)}, "fp8", 128, ["model.layers.0.conv.weight [4, 4]"]),
    ],
)
def test_preflight(changes, shapes: Shapes, format: str, group_size: int, words: list[str]) -> None:
    faults = preflight_quantize(config(**changes), shapes, format, group_size)
    assert len(faults) == bool(words)
    for word in words:
        assert word in faults[0]


@pytest.mark.parametrize(
    ("entry", "format", "group_size", "words"),
    [
        (INT4_ENTRY, "int4", 128, ["int4 in groups of 32", "int4 in groups of 128", "quantize.group_size"]),
        (FP8_ENTRY, "none", 128, ["are fp8", "for none", "quantize.format"]),
        (None, "fp8", 128, ["are not quantized", "for fp8"]),
        (INT4_ENTRY, "int4", 32, []),
        (FP8_ENTRY, "fp8", 32, []),
        (None, "none", 128, []),
    ],
)
def test_training_and_rollout_must_have_one_grid(entry, format: str, group_size: int, words: list[str]) -> None:
    if not words:
        require_format(entry, format, group_size)
        return
    with pytest.raises(QuantizationError) as caught:
        require_format(entry, format, group_size)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("format", "bytes_a_weight", "ratio"),
    [("fp8", 1 + 4 / 128**2, 1.96), ("int4", 0.5 + 2 / 128, 3.39), ("int4", 0.5 + 2 / 32, 3.15)],
)
def test_size_ratio_of_a_whole_qwen3_30b_a3b(format, bytes_a_weight: float, ratio: float) -> None:
    """Against bf16, embeddings and head included: 1.9 and 3.1 times smaller or better."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    geometry = geometry_from_config(config.to_diff_dict() | {"architectures": ["Qwen3MoeForCausalLM"]})
    shapes = {name: shape for rule in rules_for(geometry, 0) for name, shape in rule.hf_shapes().items()}
    total = 2 * sum(math.prod(shape) for shape in shapes.values())
    quantized = sum(math.prod(shapes[name]) for name in quantized_names(shapes, format))
    assert round(total / 1e9, 1) == 61.1
    assert round(total / (total - quantized * (2 - bytes_a_weight)), 2) == ratio


def test_preflight_needs_no_torch() -> None:
    code = "import sys; import conversion.quantization.policy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
