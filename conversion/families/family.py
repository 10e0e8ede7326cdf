"""What a model family is, and what families share in reading config.json."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conversion.families.config_reader import ConfigReader
from conversion.geometry import ModelGeometry, RopeGeometry


@dataclass(frozen=True)
class HfNames:
    """Where a family's tensor names depart from the most common ones; all relative to `model.layers.{i}`."""

    pre_mlp_norm: str = "post_attention_layernorm"
    post_attention_norm: str = ""  # sandwich norms only
    post_mlp_norm: str = ""
    moe: str = "mlp"
    gate: str = "gate_proj"  # of a routed expert
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str = "gate.e_score_correction_bias"


@dataclass(frozen=True)
class Family:
    """A model family: how to read its config.json and what its tensors are called."""

    architecture: str  # exact name in config.json
    model_type: str  # as config.json has it; used where `architectures` is absent
    read: Callable[[ConfigReader], ModelGeometry]
    hf_names: HfNames = field(default_factory=HfNames)


def read_decoder(
    config: ConfigReader,
    *,
    rope: RopeGeometry,
    head_dim: int,
    norm_eps: float = 1e-6,
    tie_embeddings: bool = False,
    hidden_act: str = "silu",
    **family: Any,
) -> ModelGeometry:
    """The fields that all decoders have, and `family`: further fields of ModelGeometry.

    `norm_eps` and `tie_embeddings` are the defaults of the family's config class, `hidden_act` is what it supports.
    """
    config.only("attention_dropout", 0.0)
    config.only("is_encoder_decoder", False)
    config.only("hidden_act", hidden_act)
    common: dict[str, Any] = {
        "architecture": config.architecture,
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "num_heads": config.size("num_attention_heads"),
        "num_kv_heads": config.size("num_key_value_heads", default=config.size("num_attention_heads")),
        "head_dim": head_dim,
        "ffn_hidden_size": config.size("intermediate_size"),
        "vocab_size": config.size("vocab_size"),
        "max_position": config.size("max_position_embeddings"),
        "norm_eps": float(config.get("rms_norm_eps", norm_eps)),
        "rope": rope,
        "tie_embeddings": config.get("tie_word_embeddings", tie_embeddings),
    }
    geometry = ModelGeometry(**(common | family))
    if geometry.num_heads % geometry.num_kv_heads:
        config.refuse(
            f"num_attention_heads {geometry.num_heads} is not a multiple of num_key_value_heads {geometry.num_kv_heads}"
        )
    return geometry


def read_head_dim(config: ConfigReader, default: int | None = None) -> int:
    """`head_dim`, else the default of the config class, else hidden_size / num_attention_heads."""
    heads = config.size("num_attention_heads")
    return config.size("head_dim", default=default or max(config.size("hidden_size") // heads, 1))


def read_sliding(config: ConfigReader, window: int | None, layer_types: list[str]) -> dict[str, Any]:
    """Sliding-window fields of ModelGeometry; `layer_types` is used where config.json has none.

    `window` is the number of tokens seen, the token itself included; None switches sliding off in every layer.
    """
    types = config.get("layer_types", layer_types)
    for unknown in sorted(set(types) - {"full_attention", "sliding_attention"}):
        config.refuse(f"layer_types holds {unknown!r}, supported: 'full_attention', 'sliding_attention'")
    if len(types) != config.size("num_hidden_layers"):
        config.refuse(f"layer_types has {len(types)} entries for {config.size('num_hidden_layers')} layers")
    is_sliding = tuple(kind == "sliding_attention" for kind in types)
    if window is None or not any(is_sliding):
        return {}
    return {"sliding_window": window, "is_sliding_layer": is_sliding}
