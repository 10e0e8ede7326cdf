"""Llama (also SmolLM2) and Mistral: the plain decoder."""

from conversion.families.config_reader import ConfigReader
from conversion.families.family import Family, read_decoder, read_head_dim, read_sliding
from conversion.families.rope import read_rope
from conversion.geometry import ModelGeometry


def _read_llama(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config)
    bias = config.get("attention_bias", False)
    config.only("rope_interleaved", False)
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
    )


def _read_mistral(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config)
    sliding = ["sliding_attention"] * config.size("num_hidden_layers")
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim),
        **read_sliding(config, config.nullable("sliding_window", 4096), sliding),
    )


LLAMA = Family("LlamaForCausalLM", "llama", _read_llama)
MISTRAL = Family("MistralForCausalLM", "mistral", _read_mistral)
