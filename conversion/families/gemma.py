"""Gemma 2 and the text models of Gemma 3: norms on both sides of each block, sliding layers, scaled embedding."""

import math
from typing import Any

from conversion.families.config_reader import ConfigReader
from conversion.families.family import Family, HfNames, read_decoder, read_head_dim, read_sliding
from conversion.families.rope import read_rope, rope_from_parameters
from conversion.geometry import ModelGeometry, RopeGeometry

_NAMES = HfNames(
    pre_mlp_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


def _read_gemma2(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config, default=256)
    return _read_common(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim),
        sliding_pattern=2,
        attention_softcap=config.nullable("attn_logit_softcapping", 50.0),
        logit_softcap=config.nullable("final_logit_softcapping", 30.0),
    )


def _read_gemma3(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config, default=256)
    parameters = config.mapping("rope_parameters")
    full: dict[str, Any] = {"rope_theta": config.get("rope_theta", 1_000_000.0)}
    full |= (parameters.get("full_attention") or {}) | config.mapping("rope_scaling")
    local: dict[str, Any] = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    local |= parameters.get("sliding_attention") or {}
    for unknown in sorted(parameters.keys() - {"full_attention", "sliding_attention"}):
        config.refuse(f"rope_parameters holds {unknown!r}, supported: 'full_attention', 'sliding_attention'")
    local_rope = rope_from_parameters(config, local, head_dim)
    if local_rope.scaling is not None:
        config.refuse(f"rope of sliding layers is scaled: {local_rope.scaling}, supported: 'default'")
    config.only("attn_logit_softcapping", None)
    return _read_common(
        config,
        head_dim=head_dim,
        rope=rope_from_parameters(config, full, head_dim),
        sliding_pattern=config.size("sliding_window_pattern", "_sliding_window_pattern", default=6),
        local_rope_theta=local_rope.theta,
        logit_softcap=config.nullable("final_logit_softcapping", None),
        qk_norm="head",
    )


def _read_common(
    config: ConfigReader, *, head_dim: int, rope: RopeGeometry, sliding_pattern: int, **family: Any
) -> ModelGeometry:
    """`sliding_pattern`: every so manieth layer sees all tokens, the others slide."""
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", False)
    bias = config.get("attention_bias", False)
    layers = range(config.size("num_hidden_layers"))
    types = ["sliding_attention" if (i + 1) % sliding_pattern else "full_attention" for i in layers]
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=rope,
        tie_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        activation="gelu_tanh",
        qkv_bias=bias,
        attention_out_bias=bias,
        sandwich_norms=True,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config.size("hidden_size")),
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        **read_sliding(config, config.nullable("sliding_window", 4096), types),
        **family,
    )


GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", _read_gemma2, _NAMES)
GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", _read_gemma3, _NAMES)
