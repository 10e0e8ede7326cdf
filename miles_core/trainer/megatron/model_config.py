"""From our model geometry and trainer configuration to megatron-core's TransformerConfig.

The only place that names TransformerConfig's fields. What megatron-core, or the modules of ours in its layers, cannot
express is refused (miles_core/config/preflight_layout.py).
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
from miles_core.config.preflight_layout import layout_faults, stage_layers
from miles_core.config.trainer import TrainerConfig
from miles_core.device import device_type
from miles_core.exact.functions import activation
from miles_core.exact.gradient import with_gradient_of


class UnsupportedGeometryError(ValueError):
    """A model, or a parallel layout of it, that the Megatron trainer cannot hold. Lists all faults at once."""


@dataclass
class DecoderConfig(TransformerConfig):
    """TransformerConfig that also carries the geometry, for the modules of ours, and whether its sums are exact."""

    geometry: ModelGeometry | None = None
    exact: bool = False


@dataclass
class LatentDecoderConfig(MLATransformerConfig):
    """The same with latent attention."""

    geometry: ModelGeometry | None = None
    exact: bool = False


def transformer_config(
    geometry: ModelGeometry,
    trainer: TrainerConfig,
    *,
    mtp_num_layers: int,
    routing_replay: bool,
) -> DecoderConfig | LatentDecoderConfig:
    """TransformerConfig of the model and the layout.

    Args:
        geometry: shape of the model.
        trainer: precision and parallel sizes.
        mtp_num_layers: MTP layers to build.
        routing_replay: give every router a place for replayed experts.

    Raises:
        UnsupportedGeometryError: lists what cannot be expressed.
    """
    on_gpu = device_type() != "cpu"
    faults = layout_faults(geometry, trainer)
    if trainer.exact and geometry.mla is not None:
        faults.append("latent attention with trainer.exact=true: the engine multiplies its matrices in another order")
    if trainer.exact and on_gpu:
        faults.append("trainer.exact=true on a GPU: it is for CPUs; set trainer.exact=false")
    if faults:
        raise UnsupportedGeometryError(f"{geometry.architecture}: " + "; ".join(faults))
    bf16 = trainer.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    parallel = trainer.parallel
    fields: dict[str, Any] = {
        "geometry": geometry,
        "exact": trainer.exact,
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
        "activation_func": _activation(geometry, exact=trainer.exact),
        "add_bias_linear": False,  # biases of single projections: layer_spec.py
        "add_qkv_bias": geometry.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": bf16,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor,
        "context_parallel_size": parallel.context,
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
        "bias_activation_fusion": on_gpu and geometry.activation == "silu",
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "cuda_graph_scope": [],
    }
    if trainer.recompute == "full":  # from each layer's input
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if geometry.num_layers % parallel.pipeline:
        fields["num_layers_in_last_pipeline_stage"] = len(stage_layers(geometry.num_layers, parallel.pipeline)[-1])
    if geometry.moe is not None:
        fields |= _moe_fields(geometry.moe, routing_replay)
    config: DecoderConfig | LatentDecoderConfig
    if geometry.mla is None:
        config = DecoderConfig(**fields)
    else:
        config = LatentDecoderConfig(**fields, **_mla_fields(geometry.mla))
    # Stages tell each other the shape of every micro-batch. Set afterwards because the constructor refuses it for the
    # allgather dispatcher, whose ranks must hold equally many tokens: batching gives them that.
    config.variable_seq_lengths = parallel.pipeline > 1
    return config


def _activation(geometry: ModelGeometry, *, exact: bool) -> Callable[[Tensor], Tensor]:
    plain = F.silu if geometry.activation == "silu" else partial(F.gelu, approximate="tanh")
    if not exact:
        return plain
    value = partial(activation, geometry.activation)
    return lambda x: with_gradient_of(plain, value, x)


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


def _mla_fields(mla: MlaGeometry) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",  # of a module that is never called: our attention rotates, and knows the scale
    }
