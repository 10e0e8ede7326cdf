"""DeepSeek-V3 and R1: latent attention, grouped sigmoid router, shared experts, MTP."""

import math

from conversion.families.config_reader import ConfigReader
from conversion.families.family import Family, read_decoder
from conversion.families.moe import read_grouped_sigmoid_moe
from conversion.families.rope import read_rope
from conversion.geometry import MlaGeometry, ModelGeometry, RopeGeometry

_LATENT_NORM_EPS = 1e-6  # of the norms inside the attention; the config's rms_norm_eps doesn't reach them


def _read(config: ConfigReader) -> ModelGeometry:
    mla = MlaGeometry(
        q_lora_rank=config.nullable("q_lora_rank", 1536),
        kv_lora_rank=config.size("kv_lora_rank", default=512),
        qk_nope_head_dim=config.size("qk_nope_head_dim", default=128),
        qk_rope_head_dim=config.size("qk_rope_head_dim", default=64),
        v_head_dim=config.size("v_head_dim", default=128),
    )
    # Neighbouring dims form a pair, which Megatron's latent attention always assumes: its rope de-interleaves them
    # itself, so its `rotary_interleaved` stays False and the weights are not permuted.
    config.only("rope_interleave", True)
    config.only("attention_bias", False)
    config.only("rms_norm_eps", _LATENT_NORM_EPS)
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    config.only("head_dim", mla.qk_rope_head_dim, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    config.only("qk_head_dim", mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    rope = read_rope(config, mla.qk_rope_head_dim, interleaved=True)
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=rope,
        attention_scale=_yarn_attention_scale(rope, head_dim),
        mla=mla,
        moe=read_grouped_sigmoid_moe(config, dense_layers=3, routed_scaling=2.5, num_groups=8, topk_groups=4),
        mtp_num_layers=config.get("num_nextn_predict_layers", 1, "num_mtp_layers"),
    )


def _yarn_attention_scale(rope: RopeGeometry, head_dim: int) -> float | None:
    """YaRN (Peng et al. 2023) sharpens the attention of extended contexts; DeepSeek puts it on the scores, squared."""
    mscale = (rope.scaling or {}).get("mscale_all_dim")
    if not mscale or rope.scaling is None or rope.scaling["factor"] <= 1:
        return None
    return (0.1 * mscale * math.log(rope.scaling["factor"]) + 1.0) ** 2 / math.sqrt(head_dim)


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", _read)
