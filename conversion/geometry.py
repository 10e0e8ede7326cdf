"""ModelGeometry: the shape of a decoder, read once from a Hugging Face config.json.

Everything that must know a model's shape (the embedded engine, the Megatron model, the conversion) reads it here, so
that there is one interpretation of config.json. No torch.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeGeometry:
    """Rotary position embedding."""

    theta: float
    rotary_dim: int  # of each head: its first dims; with latent attention all dims of the rope part
    interleaved: bool = False  # pairs (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
    scaling: dict[str, Any] | None = None  # rope_type ("linear", "llama3", "yarn") and its parameters; None where plain


@dataclass(frozen=True)
class MoeGeometry:
    """Routed experts."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    is_moe_layer: tuple[bool, ...]  # of each decoder layer
    score: Literal["softmax", "sigmoid"]
    router_bias: bool  # e_score_correction_bias: added for the choice, not for the weight
    norm_topk: bool  # chosen weights are divided by their sum
    routed_scaling: float = 1.0
    num_groups: int = 1  # group-limited choice (DeepSeek): the best `topk_groups` of `num_groups` compete,
    # a group being as good as the sum of its best two
    topk_groups: int = 1
    shared_ffn_hidden_size: int = 0  # of all shared experts together; 0: none
    shared_gate: bool = False  # Qwen2-MoE: sigmoid gate on the shared expert


@dataclass(frozen=True)
class MlaGeometry:
    """Multi-head latent attention (DeepSeek)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelGeometry:
    """The shape of a decoder-only model."""

    architecture: str  # config.json architectures[0], e.g. "Glm4MoeForCausalLM"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; with latent attention qk_nope_head_dim + qk_rope_head_dim
    ffn_hidden_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeGeometry
    tie_embeddings: bool
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # over each head, or over the whole projected width (MiniMax)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    moe: MoeGeometry | None = None
    mla: MlaGeometry | None = None
    mtp_num_layers: int = 0  # layers num_layers, num_layers + 1, ... of the checkpoint
    # Gemma, and attention_scale also DeepSeek, and sliding layers also Mistral and Qwen
    sandwich_norms: bool = False  # a norm after attention and after the MLP as well as before
    norm_plus_one: bool = False  # norm multiplies by 1 + weight
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None  # tokens that sliding layers see, the token itself included; None: no such layer
    is_sliding_layer: tuple[bool, ...] = ()  # of each decoder layer; empty: none slides
    local_rope_theta: float | None = None  # of sliding layers, where it differs

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` has routed experts; MTP layers are counted on and are like the last one."""
        if self.moe is None:
            return False
        return self.moe.is_moe_layer[min(layer, self.num_layers - 1)]
