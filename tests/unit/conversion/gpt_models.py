"""megatron-core's own GPTModel (local layer spec, sequential experts) of a geometry, on this rank of any layout."""

import torch
import torch.nn.functional as F

from conversion.geometry import ModelGeometry
from miles_core.trainer.megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)

# True without Transformer Engine, because importing its empty wrapper succeeds; then a class that is None is used.
multi_latent_attention.HAVE_TE = False


class _NoAttention(torch.nn.Module):
    """Checkpoints need no core attention, and the local one refuses latent attention's arguments."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


def gpt_model(g: ModelGeometry, mtp_num_layers: int, core_attention: type[torch.nn.Module] = _NoAttention) -> GPTModel:
    """The part of this rank, by the process groups now in place; fp32."""
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    config_class, fields = _config(g)
    config = config_class(
        **fields,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        mtp_num_layers=mtp_num_layers or None,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = core_attention
    has_mtp = mtp_num_layers > 0 and last
    return GPTModel(
        config,
        spec,
        vocab_size=-(-g.vocab_size // tensor_size) * tensor_size,
        max_sequence_length=g.max_position,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        rotary_percent=g.rope.rotary_dim / (g.mla.qk_rope_head_dim if g.mla else g.head_dim),
        rotary_base=g.rope.theta,
        share_embeddings_and_output_weights=g.tie_embeddings,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if has_mtp else None,
    )


def _config(g: ModelGeometry) -> tuple[type[TransformerConfig], dict[str, object]]:
    fields: dict[str, object] = {
        "num_layers": g.num_layers,
        "hidden_size": g.hidden_size,
        "num_attention_heads": g.num_heads,
        "num_query_groups": g.num_kv_heads,
        "kv_channels": g.head_dim,
        "ffn_hidden_size": g.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": g.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": g.mlp_bias,
        "add_qkv_bias": g.qkv_bias,
        "qk_layernorm": g.qk_norm == "head" or g.mla is not None,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "apply_rope_fusion": False,
    }
    if moe := g.moe:
        grouped = moe.num_groups > 1
        fields |= {
            "num_moe_experts": moe.num_experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_layer_freq": [int(is_moe) for is_moe in moe.is_moe_layer],
            "moe_router_score_function": moe.score,
            "moe_router_enable_expert_bias": moe.router_bias,
            "moe_router_topk_scaling_factor": moe.routed_scaling if moe.score == "sigmoid" else None,
            "moe_router_num_groups": moe.num_groups if grouped else None,
            "moe_router_group_topk": moe.topk_groups if grouped else None,
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    if (mla := g.mla) is None:
        return TransformerConfig, fields
    fields |= {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
        "rotary_base": g.rope.theta,
        "rotary_interleaved": False,
    }
    return MLATransformerConfig, fields


def named_tensors(model: GPTModel) -> dict[str, torch.Tensor]:
    """Parameters and expert biases by global Megatron name, in this rank's part."""
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    return {_global_name(name, model): tensor for name, tensor in tensors.items()}


def _global_name(name: str, model: GPTModel) -> str:
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        layers = model.config.num_layers // model.config.pipeline_model_parallel_size
        parts[2] = str(int(parts[2]) + layers * parallel_state.get_pipeline_model_parallel_rank())
    if "local_experts" in parts:
        local = model.config.num_moe_experts // model.config.expert_model_parallel_size
        at = parts.index("local_experts") + 1
        parts[at] = str(int(parts[at]) + local * parallel_state.get_expert_model_parallel_rank())
    return ".".join(parts)


def local_part(name: str, whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor: vocabulary padded with zeros, fc1 cut within gate and within up."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if not getattr(local, "tensor_model_parallel", False) or size == 1:
        return whole
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        whole = F.pad(whole, (0, 0, 0, -len(whole) % size))
    if "linear_fc1" in name:
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    return whole.chunk(size, dim=local.partition_dim)[rank]
