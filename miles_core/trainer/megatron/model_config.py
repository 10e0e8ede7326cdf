"""From our model geometry and trainer configuration to megatron-core's TransformerConfig.

The only place that names TransformerConfig's fields. What megatron-core, or the modules of ours in its layers, cannot
express is refused here with the value found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from conversion.geometry import MlaGeometry, ModelGeometry, MoeGeometry
from miles_core.config.run import ExactWith
from miles_core.config.trainer import TrainerConfig
from miles_core.device import device_type
from miles_core.exact.functions import activation
from miles_core.exact.gradient import with_gradient_of


class UnsupportedGeometryError(ValueError):
    """A model, or a parallel layout of it, that the Megatron trainer cannot hold. Lists all faults at once."""


@dataclass
class DecoderConfig(TransformerConfig):
    """TransformerConfig that also carries the geometry, for the modules of ours, and the engine to equal exactly."""

    geometry: ModelGeometry | None = None
    exact_with: ExactWith | None = None


@dataclass
class LatentDecoderConfig(MLATransformerConfig):
    """The same with latent attention."""

    geometry: ModelGeometry | None = None
    exact_with: ExactWith | None = None


def transformer_config(
    geometry: ModelGeometry,
    trainer: TrainerConfig,
    *,
    mtp_num_layers: int,
    routing_replay: bool,
    exact_with: ExactWith | None = None,
) -> DecoderConfig | LatentDecoderConfig:
    """TransformerConfig of the model and the layout.

    Args:
        geometry: shape of the model.
        trainer: precision and parallel sizes.
        mtp_num_layers: MTP layers to build.
        routing_replay: give every router a place for replayed experts.
        exact_with: the engine whose log-probs are to be had bit for bit.

    Raises:
        UnsupportedGeometryError: lists what cannot be expressed.
    """
    faults = _faults(geometry, trainer)
    if exact_with is not None and geometry.mla is not None:
        faults.append("latent attention with trainer.exact=true: engines multiply its matrices in another order")
    if faults:
        raise UnsupportedGeometryError(f"{geometry.architecture}: " + "; ".join(faults))
    on_gpu = device_type() != "cpu"
    bf16 = trainer.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    parallel = trainer.parallel
    fields: dict[str, Any] = {
        "geometry": geometry,
        "exact_with": exact_with,
        "num_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.num_heads,
        "num_query_groups": geometry.num_kv_heads,
        "kv_channels": geometry.head_dim,
        "ffn_hidden_size": geometry.ffn_hidden_size,
        "mtp_num_layers": mtp_num_layers or None,
        "normalization": "RMSNorm",
        "layernorm_epsilon": geometry.norm_eps,
        "layernorm_zero_centered_gamma": geometry.norm_plus_one,
        "qk_layernorm": geometry.qk_norm != "none",
        "gated_linear_unit": True,
        "activation_func": _activation(geometry, exact_with),
        "add_bias_linear": False,  # biases of single projections: layer_spec.py
        "add_qkv_bias": geometry.qkv_bias,
        "softmax_scale": geometry.attention_scale,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": bf16,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.tensor > 1,
        "batch_p2p_comm": False,
        # Our loss is already a sum with weights over the global batch: nothing may be averaged.
        "calculate_per_token_loss": True,
        # Weights are read from a checkpoint: neither random initialization nor a copy on the host.
        "perform_initialization": False,
        "use_cpu_initialization": not on_gpu,
        "bias_activation_fusion": on_gpu and geometry.activation == "silu" and exact_with is None,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "cuda_graph_scope": [],
    }
    if geometry.moe is not None:
        fields |= _moe_fields(geometry.moe, routing_replay)
    config: DecoderConfig | LatentDecoderConfig
    if geometry.mla is None:
        config = DecoderConfig(**fields)
    else:
        config = LatentDecoderConfig(**fields, **_mla_fields(geometry, geometry.mla))
    # Stages tell each other the shape of every micro-batch. Set afterwards because the constructor refuses it for the
    # allgather dispatcher, whose ranks must hold equally many tokens: batching gives them that.
    config.variable_seq_lengths = parallel.pipeline > 1
    return config


def _activation(geometry: ModelGeometry, exact_with: ExactWith | None) -> Callable[[Tensor], Tensor]:
    plain = F.silu if geometry.activation == "silu" else partial(F.gelu, approximate="tanh")
    if exact_with == "embedded":
        exact = partial(activation, geometry.activation)
        return lambda x: with_gradient_of(plain, exact, x)
    return plain


def _moe_fields(moe: MoeGeometry, routing_replay: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(is_moe) for is_moe in moe.is_moe_layer],
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.norm_topk,
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_bias_update_rate": 0.0,  # the bias balances pretraining; RL holds it fixed
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.topk_groups if moe.num_groups > 1 else None,
        "moe_router_topk_scaling_factor": moe.routed_scaling if moe.routed_scaling != 1 else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # The all-to-all dispatcher needs CUDA streams.
        "moe_token_dispatcher_type": "allgather" if device_type() == "cpu" else "alltoall",
        "moe_enable_routing_replay": routing_replay,
    }


def _mla_fields(geometry: ModelGeometry, mla: MlaGeometry) -> dict[str, Any]:
    scaling = geometry.rope.scaling
    fields: dict[str, Any] = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": geometry.rope.theta,
        "rope_type": "rope" if scaling is None else "yarn",
        "rotary_scaling_factor": 1.0 if scaling is None else scaling["factor"],
    }
    if scaling is not None:
        fields |= {
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": scaling.get("beta_fast", 32),
            "beta_slow": scaling.get("beta_slow", 1),
            "mscale": scaling.get("mscale", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
        }
    return fields


def _faults(geometry: ModelGeometry, trainer: TrainerConfig) -> list[str]:
    g, parallel = geometry, trainer.parallel
    faults = []
    if g.num_layers % parallel.pipeline:
        faults.append(
            f"{g.num_layers} layers are no multiple of trainer.parallel.pipeline {parallel.pipeline}: every stage "
            "holds the same number"
        )
    for name, heads in (("query", g.num_heads), ("key-value", g.num_kv_heads)):
        if heads % parallel.tensor:
            faults.append(f"{heads} {name} heads are no multiple of trainer.parallel.tensor {parallel.tensor}")
    if g.mla is not None and parallel.tensor > 1:
        faults.append(
            f"latent attention with trainer.parallel.tensor {parallel.tensor}: megatron-core does not add up the "
            "gradient of the shared rotary key over tensor-parallel ranks without Transformer Engine; set it to 1"
        )
    if g.qk_norm == "full" and parallel.tensor > 1:
        faults.append(
            f"a norm over all query heads with trainer.parallel.tensor {parallel.tensor}: no rank has all heads; "
            "set it to 1"
        )
    if g.moe is None and parallel.expert > 1:
        faults.append(f"trainer.parallel.expert {parallel.expert} on a model without experts; set it to 1")
    if g.moe is not None:
        faults += _moe_faults(g.moe, parallel.expert)
    faults += _rope_faults(g)
    return faults


def _moe_faults(moe: MoeGeometry, expert_parallel: int) -> list[str]:
    faults = []
    if moe.num_experts % expert_parallel:
        faults.append(f"{moe.num_experts} experts are no multiple of trainer.parallel.expert {expert_parallel}")
    if moe.score == "softmax" and moe.router_bias:
        faults.append("a router bias with softmax scores: Megatron's router takes one with sigmoid scores only")
    if moe.score == "sigmoid" and moe.norm_topk == (moe.top_k == 1):
        faults.append(
            f"norm_topk={moe.norm_topk} with {moe.top_k} experts a token and sigmoid scores: Megatron's router divides "
            "by the sum exactly where there are several"
        )
    if moe.num_groups > 1 and moe.top_k // moe.topk_groups != 2:
        faults.append(
            f"top_k {moe.top_k} over {moe.topk_groups} groups: Megatron's router ranks groups by their best "
            f"{moe.top_k // moe.topk_groups} experts, the model by their best 2"
        )
    return faults


def _rope_faults(g: ModelGeometry) -> list[str]:
    kind = (g.rope.scaling or {}).get("rope_type", "default")
    if g.mla is not None:
        faults = [] if g.rope.interleaved else ["rope without interleaving: Megatron's latent attention interleaves"]
        if kind not in ("default", "yarn"):
            faults.append(f"rope scaling {kind!r} with latent attention; supported: yarn")
        return faults
    faults = ["interleaved rope without latent attention"] if g.rope.interleaved else []
    if kind not in ("default", "linear", "llama3"):
        faults.append(f"rope scaling {kind!r}; supported: linear, llama3, and yarn with latent attention")
    return faults
