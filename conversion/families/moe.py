"""The mixture of experts that DeepSeek-V3 introduced and GLM-4.5 took over."""

from conversion.families.config_reader import ConfigReader
from conversion.geometry import MoeGeometry


def read_grouped_sigmoid_moe(
    config: ConfigReader, *, dense_layers: int, routed_scaling: float, num_groups: int, topk_groups: int
) -> MoeGeometry:
    """Sigmoid scores, a correction bias for the choice, groups, a shared expert; arguments are the class's defaults."""
    num_layers = config.size("num_hidden_layers")
    num_experts = config.size("n_routed_experts", "num_local_experts")
    first_moe = config.get("first_k_dense_replace", dense_layers)
    width = config.size("moe_intermediate_size")
    top_k = config.size("num_experts_per_tok")
    groups, top_groups = config.size("n_group", default=num_groups), config.size("topk_group", default=topk_groups)
    if first_moe >= num_layers:
        config.refuse(f"first_k_dense_replace {first_moe} leaves none of {num_layers} layers with routed experts")
    if num_experts % groups:
        config.refuse(f"n_routed_experts {num_experts} is not a multiple of n_group {groups}")
    if groups > 1 and top_k != 2 * top_groups:
        # A group's rank is the sum of its best 2 scores here, of its best top_k / topk_group in Megatron.
        config.refuse(f"num_experts_per_tok {top_k} must be twice topk_group {top_groups} where n_group is above 1")
    if top_k > num_experts:
        config.refuse(f"num_experts_per_tok {top_k} is larger than n_routed_experts {num_experts}")
    return MoeGeometry(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden_size=width,
        is_moe_layer=tuple(layer >= first_moe for layer in range(num_layers)),
        score="sigmoid",
        router_bias=True,
        norm_topk=config.get("norm_topk_prob", True),
        routed_scaling=float(config.get("routed_scaling_factor", routed_scaling)),
        num_groups=groups,
        topk_groups=top_groups,
        shared_ffn_hidden_size=width * config.size("n_shared_experts", default=1),
    )
