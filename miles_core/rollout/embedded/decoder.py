"""The decoder: how embedding, layers and head fit together."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from conversion.families.family import HfNames
from conversion.geometry import ModelGeometry
from miles_core.rollout.embedded.attention import GroupedQueryAttention, LatentAttention
from miles_core.rollout.embedded.blocks import Allocate, Mlp, NamedTensors, RmsNorm
from miles_core.rollout.embedded.forward_pass import Attention, ForwardPass
from miles_core.rollout.embedded.kv_cache import KVCache
from miles_core.rollout.embedded.moe import MixtureOfExperts
from miles_core.rollout.embedded.rope import RopeTables
from miles_core.rollout.embedded.sampler import scaled_log_softmax


class DecoderLayer:
    """Attention and MLP, each around a residual; Gemma normalises what they give as well as what they get."""

    def __init__(self, g: ModelGeometry, names: HfNames, layer: int, allocate: Allocate) -> None:
        attention = partial(LatentAttention, g, g.mla) if g.mla else partial(GroupedQueryAttention, g)
        self.attention = attention(layer, allocate)
        self.moe = MixtureOfExperts(g, g.moe, allocate) if g.moe and g.is_moe(layer) else None
        self.mlp = None if self.moe else Mlp(g, g.ffn_hidden_size, allocate, bias=g.mlp_bias)
        norm = partial(RmsNorm, allocate, g.hidden_size, eps=g.norm_eps, plus_one=g.norm_plus_one)
        self.pre_attention_norm, self.pre_mlp_norm = norm(), norm()
        self.post_attention_norm = norm() if g.sandwich_norms else None
        self.post_mlp_norm = norm() if g.sandwich_norms else None
        self.names = names

    def tensors(self, prefix: str) -> NamedTensors:
        yield f"{prefix}.input_layernorm.weight", self.pre_attention_norm.weight
        yield f"{prefix}.{self.names.pre_mlp_norm}.weight", self.pre_mlp_norm.weight
        if self.post_attention_norm is not None and self.post_mlp_norm is not None:
            yield f"{prefix}.{self.names.post_attention_norm}.weight", self.post_attention_norm.weight
            yield f"{prefix}.{self.names.post_mlp_norm}.weight", self.post_mlp_norm.weight
        yield from self.attention.tensors(f"{prefix}.self_attn")
        if self.moe is not None:
            yield from self.moe.tensors(f"{prefix}.{self.names.moe}", self.names)
        if self.mlp is not None:
            yield from self.mlp.tensors(f"{prefix}.mlp")

    def forward(self, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        out = self.attention.forward(self.pre_attention_norm.forward(x), step)
        x = x + (out if self.post_attention_norm is None else self.post_attention_norm.forward(out))
        normed = self.pre_mlp_norm.forward(x)
        if self.moe is not None:
            out, experts = self.moe.forward(normed)
            step.routes.append(experts)
        elif self.mlp is not None:
            out = self.mlp.forward(normed)
        return x.add_(out if self.post_mlp_norm is None else self.post_mlp_norm.forward(out))


class Decoder:
    """A decoder with uninitialised weights; `tensors` names the views that receive them."""

    def __init__(self, g: ModelGeometry, names: HfNames, dtype: torch.dtype, device: torch.device) -> None:
        allocate = partial(_allocate, dtype=dtype, device=device)
        self.geometry, self.dtype, self.device = g, dtype, device
        self.embedding = allocate(g.vocab_size, g.hidden_size)
        self.layers = [DecoderLayer(g, names, layer, allocate) for layer in range(g.num_layers)]
        self.final_norm = RmsNorm(allocate, g.hidden_size, eps=g.norm_eps, plus_one=g.norm_plus_one)
        self.head = self.embedding if g.tie_embeddings else allocate(g.vocab_size, g.hidden_size)
        self.embedding_scale = torch.tensor(g.embedding_scale, dtype=dtype, device=device)
        self.moe_layers = [layer for layer in range(g.num_layers) if g.is_moe(layer)]
        self.top_k = g.moe.top_k if g.moe else 0
        self.attention: Attention | None = None  # in place of what passes take for the fastest

    def tensors(self) -> NamedTensors:
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            yield from layer.tensors(f"model.layers.{i}")
        yield "model.norm.weight", self.final_norm.weight
        if not self.geometry.tie_embeddings:
            yield "lm_head.weight", self.head

    def forward(self, token_ids: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """Token ids int64 [tokens] -> final hidden states [tokens, hidden]."""
        x = F.embedding(token_ids, self.embedding) * self.embedding_scale
        for layer in self.layers:
            x = layer.forward(x, step)
        return self.final_norm.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [tokens, hidden] -> float32 [tokens, vocab]."""
        logits = F.linear(hidden, self.head).float()
        cap = self.geometry.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def log_softmax(self, logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
        """log softmax(logits / temperature) over the last dim, in float32."""
        return scaled_log_softmax(logits, temperature)

    def all_layers(self, routes: np.ndarray) -> np.ndarray:
        """Routes [tokens, MoE layers, top_k] -> [tokens, layers, top_k], -1 in dense layers."""
        widened = np.full((len(routes), self.geometry.num_layers, self.top_k), -1, dtype=np.int16)
        widened[:, self.moe_layers] = routes
        return widened

    def ropes(self, length: int) -> RopeTables:
        """Rotations of positions 0 ... length - 1."""
        return RopeTables(self.geometry, length, self.device)

    def cache(self, num_rows: int, num_columns: int) -> KVCache:
        """A cache for `num_rows` sequences of at most `num_columns` tokens."""
        g, mla = self.geometry, self.geometry.mla
        latent_width = mla.kv_lora_rank + mla.qk_rope_head_dim if mla else None
        return KVCache(
            num_layers=g.num_layers,
            num_rows=num_rows,
            num_columns=num_columns,
            num_heads=1 if mla else g.num_kv_heads,
            key_width=latent_width or g.head_dim,
            value_width=0 if mla else g.head_dim,
            dtype=self.dtype,
            device=self.device,
        )


def _allocate(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
