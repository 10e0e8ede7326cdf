"""MiniMax-M2: norms over the whole query and key width, partial rope, sigmoid router with a correction bias."""

from conversion.families.config_reader import ConfigReader
from conversion.families.family import Family, HfNames, read_decoder, read_head_dim
from conversion.families.rope import read_rope
from conversion.geometry import ModelGeometry, MoeGeometry


def _read(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config, default=128)
    num_layers = config.size("num_hidden_layers")
    # Released files describe their parts in keys of their own; all of them are attention plus routed experts.
    attention_types = config.get("attn_type_list", [])
    if any(kind != 1 for kind in attention_types):
        config.refuse(f"attn_type_list is {attention_types}, supported: 1 (full attention) in every layer")
    config.only("use_qk_norm", True)
    config.only("qk_norm_type", "per_layer")
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    config.only("router_jitter_noise", 0.0)
    config.only("sliding_window", None)
    config.only("shared_intermediate_size", 0)
    config.only("layernorm_full_attention_beta", 1.0)
    config.only("layernorm_linear_attention_beta", 1.0)
    config.only("layernorm_mlp_beta", 1.0)
    # What they say of MTP modules, shared experts and dense layers concerns no tensor of the released checkpoints; if
    # one had such tensors, the conversion would name them as unmatched.
    for key in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "shared_moe_mode", "mlp_intermediate_size"):
        config.get(key, None)
    rope = read_rope(
        config,
        head_dim,
        theta=5_000_000.0,
        partial=config.get("rotary_dim", head_dim) / head_dim,
        may_be_partial=True,
    )
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=rope,
        qk_norm="full",
        moe=MoeGeometry(
            num_experts=config.size("num_local_experts", "num_experts"),
            top_k=config.size("num_experts_per_tok"),
            ffn_hidden_size=config.size("intermediate_size"),
            is_moe_layer=(True,) * num_layers,
            score="sigmoid",
            router_bias=True,
            norm_topk=True,
        ),
    )


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    _read,
    HfNames(moe="block_sparse_moe", gate="w1", up="w3", down="w2", router_bias="e_score_correction_bias"),
)
