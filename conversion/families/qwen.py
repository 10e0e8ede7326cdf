"""Qwen2 and Qwen2.5 (biases on query, key and value), Qwen3 (a norm over each head), Qwen3-MoE (softmax router)."""

from typing import Any

from conversion.families.config_reader import ConfigReader
from conversion.families.family import Family, read_decoder, read_head_dim, read_sliding
from conversion.families.rope import read_rope
from conversion.geometry import ModelGeometry, MoeGeometry


def _read_window(config: ConfigReader) -> int | None:
    window = config.nullable("sliding_window", 4096)
    return window if config.get("use_sliding_window", False) else None


def _read_sliding_upper_layers(config: ConfigReader) -> dict[str, Any]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says otherwise."""
    window, first = _read_window(config), config.get("max_window_layers", 28)
    layers = range(config.size("num_hidden_layers"))
    return read_sliding(config, window, ["sliding_attention" if i >= first else "full_attention" for i in layers])


def _read_qwen2(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config)
    config.only("use_mrope", False)  # of the vision models
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim),
        qkv_bias=True,
        **_read_sliding_upper_layers(config),
    )


def _read_qwen3(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config, default=128)
    bias = config.get("attention_bias", False)
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm="head",
        **_read_sliding_upper_layers(config),
    )


def _read_qwen3_moe(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config)
    bias = config.get("attention_bias", False)
    num_layers = config.size("num_hidden_layers")
    dense, step = config.get("mlp_only_layers", []), config.size("decoder_sparse_step", default=1)
    config.get("max_window_layers", None)  # in released files; this family slides in all layers or in none
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm="head",
        moe=MoeGeometry(
            num_experts=config.size("num_experts", "num_local_experts"),
            top_k=config.size("num_experts_per_tok"),
            ffn_hidden_size=config.size("moe_intermediate_size"),
            is_moe_layer=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
            score="softmax",
            router_bias=False,
            norm_topk=config.get("norm_topk_prob", False),
        ),
        **read_sliding(config, _read_window(config), ["sliding_attention"] * num_layers),
    )


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _read_qwen2)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _read_qwen3)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3_moe)
