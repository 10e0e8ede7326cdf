"""A tiny transformers config of every family, with no two sizes alike where the family allows it."""

import transformers
from transformers import PreTrainedConfig

_COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_GROUPED_MOE = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 3,
    "topk_group": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

TINY: dict[str, PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**_COMMON, rms_norm_eps=1e-5),
    "llama-tied-biased": transformers.LlamaConfig(
        **_COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": transformers.MistralConfig(**_COMMON, head_dim=24, sliding_window=16),
    "qwen2": transformers.Qwen2Config(**_COMMON, use_sliding_window=True, max_window_layers=1, sliding_window=16),
    "qwen2-tied": transformers.Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_COMMON, head_dim=24),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **_COMMON,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **_COMMON, **_GROUPED_MOE, head_dim=24, attention_bias=True, use_qk_norm=True
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4},
        **_GROUPED_MOE,
        q_lora_rank=20,
        kv_lora_rank=28,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3-no-q-lora": transformers.DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4},
        **_GROUPED_MOE,
        q_lora_rank=None,
        kv_lora_rank=28,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **_COMMON, head_dim=24, num_local_experts=8, num_experts_per_tok=2, rotary_dim=8
    ),
    "gemma2": transformers.Gemma2Config(**_COMMON, head_dim=24, query_pre_attn_scalar=36, sliding_window=16),
    "gemma3": transformers.Gemma3TextConfig(
        **_COMMON,
        head_dim=24,
        query_pre_attn_scalar=36,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=20.0,
    ),
}


def saved_config(name: str) -> dict:
    """config.json as `save_pretrained` writes it."""
    config = TINY[name]
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return config.to_diff_dict() | {"architectures": [model_class.__name__]}
