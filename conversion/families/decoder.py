"""The rules of a decoder, derived from its geometry and its family's tensor names.

Megatron names are those of a GPTModel of the local layer spec, unsharded, with absolute layer and expert numbers.
"""

from collections.abc import Iterator

from conversion.families.family import HfNames
from conversion.geometry import MlaGeometry, ModelGeometry, MoeGeometry
from conversion.mapping import Op, Rule, Shape
from conversion.ops import GateUp, Identity, MergeQkv


def decoder_rules(geometry: ModelGeometry, names: HfNames, mtp_num_layers: int) -> list[Rule]:
    """Every tensor of the model once, with the first `mtp_num_layers` MTP layers."""
    g, vocabulary = geometry, (geometry.vocab_size, geometry.hidden_size)
    mtp = [f"model.layers.{g.num_layers + j}" for j in range(mtp_num_layers)]
    embedding_copies = tuple(f"{layer}.embed_tokens.weight" for layer in mtp)
    head_copies = tuple(f"{layer}.shared_head.head.weight" for layer in mtp)
    if g.tie_embeddings:
        embedding_copies += ("lm_head.weight", *head_copies)

    rules = [
        _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary, embedding_copies),
        _same("decoder.final_layernorm.weight", "model.norm.weight", (g.hidden_size,)),
    ]
    if not g.tie_embeddings:
        rules.append(_same("output_layer.weight", "lm_head.weight", vocabulary, head_copies))
    for layer in range(g.num_layers):
        rules += _layer(g, names, f"decoder.layers.{layer}", f"model.layers.{layer}", layer)
    for j, hf in enumerate(mtp):
        megatron = f"mtp.layers.{j}"
        rules += [
            _same(f"{megatron}.enorm.weight", f"{hf}.enorm.weight", (g.hidden_size,)),
            _same(f"{megatron}.hnorm.weight", f"{hf}.hnorm.weight", (g.hidden_size,)),
            _same(f"{megatron}.eh_proj.weight", f"{hf}.eh_proj.weight", (g.hidden_size, 2 * g.hidden_size)),
            _same(f"{megatron}.final_layernorm.weight", f"{hf}.shared_head.norm.weight", (g.hidden_size,)),
            *_layer(g, names, f"{megatron}.transformer_layer", hf, g.num_layers + j),
        ]
    return rules


def _same(megatron: str, hf: str, shape: Shape, copies: tuple[str, ...] = ()) -> Rule:
    return Rule(megatron, (hf,), Identity(), shape, copies)


def _layer(g: ModelGeometry, names: HfNames, megatron: str, hf: str, layer: int) -> Iterator[Rule]:
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": names.pre_mlp_norm}
    if g.sandwich_norms:
        norms["post_self_attn_layernorm"] = names.post_attention_norm
        norms["post_mlp_layernorm"] = names.post_mlp_norm
    for ours, theirs in norms.items():
        yield _same(f"{megatron}.{ours}.weight", f"{hf}.{theirs}.weight", (g.hidden_size,))
    if g.mla is None:
        yield from _attention(g, f"{megatron}.self_attention", f"{hf}.self_attn")
    else:
        yield from _latent_attention(g, g.mla, f"{megatron}.self_attention", f"{hf}.self_attn")
    if g.moe is not None and g.is_moe(layer):
        yield from _moe(g, g.moe, names, f"{megatron}.mlp", f"{hf}.{names.moe}")
    else:
        yield from _mlp(g, HfNames(), g.ffn_hidden_size, f"{megatron}.mlp", f"{hf}.mlp", bias=g.mlp_bias)


def _attention(g: ModelGeometry, megatron: str, hf: str) -> Iterator[Rule]:
    merge: Op = MergeQkv(g.num_heads, g.num_kv_heads, g.head_dim)
    q_width, kv_width = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    rows = q_width + 2 * kv_width
    for kind, shape in {"weight": (rows, g.hidden_size), "bias": (rows,)}.items():
        if kind == "weight" or g.qkv_bias:
            qkv = tuple(f"{hf}.{part}_proj.{kind}" for part in "qkv")
            yield Rule(f"{megatron}.linear_qkv.{kind}", qkv, merge, shape)
    yield _same(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", (g.hidden_size, q_width))
    if g.attention_out_bias:
        yield _same(f"{megatron}.linear_proj.bias", f"{hf}.o_proj.bias", (g.hidden_size,))
    if g.qk_norm != "none":
        full = g.qk_norm == "full"
        yield _same(f"{megatron}.q_layernorm.weight", f"{hf}.q_norm.weight", (q_width if full else g.head_dim,))
        yield _same(f"{megatron}.k_layernorm.weight", f"{hf}.k_norm.weight", (kv_width if full else g.head_dim,))


def _latent_attention(g: ModelGeometry, mla: MlaGeometry, megatron: str, hf: str) -> Iterator[Rule]:
    q_width = g.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    kv_width = g.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    tensors: dict[str, tuple[str, Shape]] = {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", (mla.kv_lora_rank + mla.qk_rope_head_dim, g.hidden_size)),
        "kv_layernorm": ("kv_a_layernorm", (mla.kv_lora_rank,)),
        "linear_kv_up_proj": ("kv_b_proj", (kv_width, mla.kv_lora_rank)),
        "linear_proj": ("o_proj", (g.hidden_size, g.num_heads * mla.v_head_dim)),
    }
    if mla.q_lora_rank is None:
        tensors["linear_q_proj"] = ("q_proj", (q_width, g.hidden_size))
    else:
        tensors["linear_q_down_proj"] = ("q_a_proj", (mla.q_lora_rank, g.hidden_size))
        tensors["q_layernorm"] = ("q_a_layernorm", (mla.q_lora_rank,))
        tensors["linear_q_up_proj"] = ("q_b_proj", (q_width, mla.q_lora_rank))
    for ours, (theirs, shape) in tensors.items():
        yield _same(f"{megatron}.{ours}.weight", f"{hf}.{theirs}.weight", shape)


def _moe(g: ModelGeometry, moe: MoeGeometry, names: HfNames, megatron: str, hf: str) -> Iterator[Rule]:
    yield _same(f"{megatron}.router.weight", f"{hf}.gate.weight", (moe.num_experts, g.hidden_size))
    if moe.router_bias:
        yield _same(f"{megatron}.router.expert_bias", f"{hf}.{names.router_bias}", (moe.num_experts,))
    if moe.shared_ffn_hidden_size:
        shared = moe.shared_ffn_hidden_size
        yield from _mlp(g, HfNames(), shared, f"{megatron}.shared_experts", f"{hf}.shared_experts")
    for e in range(moe.num_experts):
        ours, theirs = f"{megatron}.experts.local_experts.{e}", f"{hf}.experts.{e}"
        yield from _mlp(g, names, moe.ffn_hidden_size, ours, theirs)


def _mlp(g: ModelGeometry, names: HfNames, width: int, megatron: str, hf: str, *, bias: bool = False) -> Iterator[Rule]:
    shapes: dict[str, tuple[Shape, Shape]] = {"weight": ((2 * width, g.hidden_size), (g.hidden_size, width))}
    if bias:
        shapes["bias"] = ((2 * width,), (g.hidden_size,))
    for kind, (fc1, fc2) in shapes.items():
        gate_up = (f"{hf}.{names.gate}.{kind}", f"{hf}.{names.up}.{kind}")
        yield Rule(f"{megatron}.linear_fc1.{kind}", gate_up, GateUp(), fc1)
        yield _same(f"{megatron}.linear_fc2.{kind}", f"{hf}.{names.down}.{kind}", fc2)
