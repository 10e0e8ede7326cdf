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
from miles_core.trainer.megatron.experts import FixedBiasRouter, GroupedExperts
from miles_core.trainer.megatron.latent_attention import LatentAttention
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig
from miles_core.trainer.megatron.norm import AllKeyHeadsNorm, AllQueryHeadsNorm, RmsNorm

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}
_FUSED_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def decoder_spec(config: DecoderConfig | LatentDecoderConfig, geometry: ModelGeometry) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, and the final norm."""
    first = get_transformer_layer_offset(config)
    layers = range(first, first + get_num_layers_to_build(config))
    return TransformerBlockSubmodules(layer_specs=[_layer(geometry, i) for i in layers], layer_norm=RmsNorm)


def mtp_spec(geometry: ModelGeometry, mtp_num_layers: int) -> MultiTokenPredictionBlockSubmodules:
    """Multi-token-prediction layers; each wraps a layer like the decoder's last one."""
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=DraftLayer,
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=RmsNorm,
                    hnorm=RmsNorm,
                    eh_proj=ColumnParallelLinear,
                    transformer_layer=_layer(geometry, geometry.num_layers + j),
                    layer_norm=RmsNorm,
                ),
            )
            for j in range(mtp_num_layers)
        ]
    )


class BiasedColumnParallelLinear(ColumnParallelLinear):
    """With a bias, whatever TransformerConfig.add_bias_linear says of all projections together."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class BiasedRowParallelLinear(RowParallelLinear):
    """With a bias, whatever TransformerConfig.add_bias_linear says of all projections together."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class SandwichLayer(TransformerLayer):
    """A layer that also normalizes what attention and MLP give, before the residual is added (Gemma 2 and 3)."""

    def __init__(self, config: DecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _norm_before_add(self.post_self_attn_layernorm)
        self.mlp_bda = _norm_before_add(self.post_mlp_layernorm)


def _norm_before_add(norm: RmsNorm) -> Callable[..., Any]:
    def normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        return residual + norm(output if bias is None else output + bias)

    return lambda training, fused: normed


def _layer(g: ModelGeometry, layer: int) -> ModuleSpec:
    return ModuleSpec(
        module=SandwichLayer if g.sandwich_norms else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=_attention(g) if g.mla is None else _latent_attention(),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=_moe() if g.is_moe(layer) else _dense_mlp(g),
            mlp_bda=get_bias_dropout_add,
            # As in megatron-core's local spec; conversion/torch_dist_keys.py says why.
            sharded_state_dict_keys_map=_FUSED_NORM_KEYS if g.mla is None else {},
        ),
    )


def _attention(g: ModelGeometry) -> ModuleSpec:
    query_norm, key_norm = {
        "none": (IdentityOp, IdentityOp),
        "head": (RmsNorm, RmsNorm),
        "full": (AllQueryHeadsNorm, AllKeyHeadsNorm),
    }[g.qk_norm]
    return ModuleSpec(
        module=SelfAttention,
        params=_CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=BiasedRowParallelLinear if g.attention_out_bias else RowParallelLinear,
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


def _dense_mlp(g: ModelGeometry) -> ModuleSpec:
    projections = (BiasedColumnParallelLinear, BiasedRowParallelLinear) if g.mlp_bias else _PROJECTIONS
    return ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=projections[0], linear_fc2=projections[1]))


_PROJECTIONS = (ColumnParallelLinear, RowParallelLinear)


def _moe() -> ModuleSpec:
    shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=GroupedExperts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            router=FixedBiasRouter,
        ),
    )
