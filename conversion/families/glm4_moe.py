"""GLM-4.5, 4.6 and 4.7: sigmoid router with a correction bias, shared expert, dense first layers, MTP."""

from conversion.families.config_reader import ConfigReader
from conversion.families.family import Family, read_decoder, read_head_dim
from conversion.families.moe import read_grouped_sigmoid_moe
from conversion.families.rope import read_rope
from conversion.geometry import ModelGeometry


def _read(config: ConfigReader) -> ModelGeometry:
    head_dim = read_head_dim(config)
    return read_decoder(
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim, partial=0.5, may_be_partial=True),
        norm_eps=1e-5,
        qkv_bias=config.get("attention_bias", False),
        qk_norm="head" if config.get("use_qk_norm", False) else "none",
        moe=read_grouped_sigmoid_moe(config, dense_layers=1, routed_scaling=1.0, num_groups=1, topk_groups=1),
        mtp_num_layers=config.get("num_nextn_predict_layers", 1, "num_mtp_layers"),
    )


GLM4_MOE = Family("Glm4MoeForCausalLM", "glm4_moe", _read)
