"""Which models, and which parallel layouts of them, the Megatron trainer can hold. No torch."""

from conversion.geometry import ModelGeometry, MoeGeometry
from miles_core.config.trainer import ParallelConfig, TrainerConfig


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Decoder layers of each pipeline stage: equally many, fewer on the last one, which has the output layer too."""
    each = -(-num_layers // stages)
    return [range(min(i * each, num_layers), min((i + 1) * each, num_layers)) for i in range(stages)]


def layout_faults(geometry: ModelGeometry, trainer: TrainerConfig) -> list[str]:
    """Why the model cannot be trained in this layout; empty where it can."""
    g, p = geometry, trainer.parallel
    faults = [*_attention_faults(g, p)]
    if not stage_layers(g.num_layers, p.pipeline)[-1]:
        each = len(stage_layers(g.num_layers, p.pipeline)[0])
        faults.append(
            f"{g.num_layers} layers in stages of {each} leave none to the last of trainer.parallel.pipeline "
            f"{p.pipeline}; set it to {-(-g.num_layers // each)} or less"
        )
    if g.ffn_hidden_size % p.tensor:
        faults.append(f"an MLP width of {g.ffn_hidden_size} is no multiple of trainer.parallel.tensor {p.tensor}")
    if g.moe is None and p.expert > 1:
        faults.append(f"trainer.parallel.expert {p.expert} on a model without experts; set it to 1")
    if g.moe is not None:
        faults += _moe_faults(g.moe, p)
    return faults


def _attention_faults(g: ModelGeometry, p: ParallelConfig) -> list[str]:
    faults = []
    if g.num_kv_heads % p.tensor:  # of which the query heads are a multiple
        faults.append(f"{g.num_kv_heads} key-value heads are no multiple of trainer.parallel.tensor {p.tensor}")
    elif g.num_heads % (p.tensor * p.context):
        faults.append(
            f"{g.num_heads} query heads are no multiple of trainer.parallel.tensor {p.tensor} x context {p.context}: "
            "context-parallel ranks exchange tokens for heads"
        )
    if g.qk_norm == "full" and p.tensor > 1:
        faults.append(
            f"a norm over all query heads with trainer.parallel.tensor {p.tensor}: no rank has all heads; set it to 1"
        )
    if g.mla is not None:
        widths = {"query": g.mla.q_lora_rank or 0, "key-value": g.mla.kv_lora_rank + g.mla.qk_rope_head_dim}
        faults += [
            f"a latent {name} width of {width} is no multiple of trainer.parallel.tensor {p.tensor}"
            for name, width in widths.items()
            if width % p.tensor
        ]
    return faults


def _moe_faults(moe: MoeGeometry, p: ParallelConfig) -> list[str]:
    faults = []
    if moe.num_experts % p.expert:
        faults.append(f"{moe.num_experts} experts are no multiple of trainer.parallel.expert {p.expert}")
    if moe.shared_ffn_hidden_size % p.tensor:
        faults.append(
            f"a shared expert's width of {moe.shared_ffn_hidden_size} is no multiple of trainer.parallel.tensor "
            f"{p.tensor}"
        )
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
