"""Which module stands where in a decoder layer: megatron-core's local spec with the parts of ours."""

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from conversion.geometry import ModelGeometry
from miles_core.trainer.megatron.attention import CoreAttention
from miles_core.trainer.megatron.draft_layer import DraftLayer
from miles_core.trainer.megatron.latent_attention import LatentAttention
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig
from miles_core.trainer.megatron.norm import RmsNorm, over_all_heads
from miles_core.trainer.megatron.parts import Parts, biased, parts_for

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}
_FUSED_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def decoder_spec(config: DecoderConfig | LatentDecoderConfig, geometry: ModelGeometry) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, and the final norm."""
    first = get_transformer_layer_offset(config)
    layers = range(first, first + get_num_layers_to_build(config))
    parts = parts_for(exact=config.exact)
    return TransformerBlockSubmodules(layer_specs=[_layer(geometry, i, parts) for i in layers], layer_norm=parts.norm)


def mtp_spec(geometry: ModelGeometry, mtp_num_layers: int) -> MultiTokenPredictionBlockSubmodules:
    """Multi-token-prediction layers; each wraps a layer like the decoder's last one."""
    parts = Parts()
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=DraftLayer,
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=RmsNorm,
                    hnorm=RmsNorm,
                    eh_proj=ColumnParallelLinear,
                    transformer_layer=_layer(geometry, geometry.num_layers + j, parts),
                    layer_norm=RmsNorm,
                ),
            )
            for j in range(mtp_num_layers)
        ]
    )


class SandwichLayer(TransformerLayer):
    """A layer that also normalizes what attention and MLP give, before the residual is added (Gemma 2 and 3)."""

    def __init__(self, config: DecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        norm = parts_for(exact=config.exact).norm
        self.post_self_attn_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _norm_before_add(self.post_self_attn_layernorm)
        self.mlp_bda = _norm_before_add(self.post_mlp_layernorm)


def _norm_before_add(norm: RmsNorm) -> Callable[..., Any]:
    def normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        return residual + norm(output if bias is None else output + bias)

    return lambda training, fused: normed


def _layer(g: ModelGeometry, layer: int, parts: Parts) -> ModuleSpec:
    return ModuleSpec(
        module=SandwichLayer if g.sandwich_norms else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=_attention(g, parts) if g.mla is None else _latent_attention(),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm,
            mlp=_moe(parts) if g.is_moe(layer) else _dense_mlp(g, parts),
            mlp_bda=get_bias_dropout_add,
            # As in megatron-core's local spec; conversion/torch_dist_keys.py says why.
            sharded_state_dict_keys_map=_FUSED_NORM_KEYS if g.mla is None else {},
        ),
    )


def _attention(g: ModelGeometry, parts: Parts) -> ModuleSpec:
    query_norm, key_norm = {
        "none": (IdentityOp, IdentityOp),
        "head": (parts.norm, parts.norm),
        "full": (over_all_heads(parts.norm, g.num_heads), over_all_heads(parts.norm, g.num_kv_heads)),
    }[g.qk_norm]
    return ModuleSpec(
        module=SelfAttention,
        params=_CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.column,
            core_attention=parts.attention,
            linear_proj=biased(parts.row) if g.attention_out_bias else parts.row,
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def _latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params=_CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RmsNorm,
            kv_layernorm=RmsNorm,
        ),
    )


def _dense_mlp(g: ModelGeometry, parts: Parts) -> ModuleSpec:
    up, down = (biased(parts.column), biased(parts.row)) if g.mlp_bias else (parts.column, parts.row)
    return ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=up, linear_fc2=down))


def _moe(parts: Parts) -> ModuleSpec:
    shared = MLPSubmodules(linear_fc1=parts.column, linear_fc2=parts.row)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=parts.experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            router=parts.router,
        ),
    )
