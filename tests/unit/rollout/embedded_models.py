"""Tiny models of every family, made by transformers with weights large enough that an error would show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCAB = 64
EOS = 3
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = _MOE | {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "num_experts_per_tok": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_parameters": _YARN_ROPE,
    "num_nextn_predict_layers": 0,
}

_CONFIGS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (Qwen3MoeConfig, _MOE | {"num_experts": 6, "mlp_only_layers": [1]}),
    "qwen3_moe_unnormed": (Qwen3MoeConfig, _MOE | {"num_experts": 6, "norm_topk_prob": False}),
    "glm4_moe": (
        Glm4MoeConfig,
        _MOE
        | {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek_v3": (DeepseekV3Config, _DEEPSEEK | {"q_lora_rank": 16}),
    "deepseek_v3_plain_q": (DeepseekV3Config, _DEEPSEEK | {"q_lora_rank": None}),
    "gemma2": (Gemma2Config, {"sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 5, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "minimax_m2": (MiniMaxM2Config, {"num_experts_per_tok": 2, "num_local_experts": 6}),
}
FAMILIES = tuple(_CONFIGS)


def write_model(family: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Writes the Hugging Face folder of a random float32 model and returns the model."""
    config_class, overrides = _CONFIGS[family]
    config = config_class(**(_COMMON | overrides))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
            elif tensor.ndim == 1:
                tensor.normal_(std=0.3)
            else:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model
