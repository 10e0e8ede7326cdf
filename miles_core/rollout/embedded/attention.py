"""Attention blocks: grouped-query, and multi-head latent (DeepSeek)."""

from functools import partial

import torch
import torch.nn.functional as F

from conversion.geometry import MlaGeometry, ModelGeometry
from miles_core.rollout.embedded.blocks import Allocate, NamedTensors, RmsNorm
from miles_core.rollout.embedded.forward_pass import ForwardPass


class GroupedQueryAttention:
    """Query, key and value projections are one matrix; norms and RoPE treat query and key heads together."""

    def __init__(self, g: ModelGeometry, layer: int, allocate: Allocate) -> None:
        self.layer = layer
        self.heads = (g.num_heads, g.num_kv_heads, g.num_kv_heads)
        self.head_dim = g.head_dim
        self.widths = [heads * g.head_dim for heads in self.heads]
        self.scale = g.head_dim**-0.5 if g.attention_scale is None else g.attention_scale
        self.qkv = allocate(sum(self.widths), g.hidden_size)
        self.qkv_bias = allocate(sum(self.widths)) if g.qkv_bias else None
        self.out = allocate(g.hidden_size, self.widths[0])
        self.out_bias = allocate(g.hidden_size) if g.attention_out_bias else None
        norm = partial(RmsNorm, allocate, eps=g.norm_eps, plus_one=g.norm_plus_one)
        self.head_norm = norm(g.num_heads + g.num_kv_heads, g.head_dim) if g.qk_norm == "head" else None
        self.full_norms = [norm(heads * g.head_dim) for heads in self.heads[:2]] if g.qk_norm == "full" else []

    def tensors(self, prefix: str) -> NamedTensors:
        for name, part in zip("qkv", self.qkv.split(self.widths), strict=True):
            yield f"{prefix}.{name}_proj.weight", part
        if self.qkv_bias is not None:
            for name, part in zip("qkv", self.qkv_bias.split(self.widths), strict=True):
                yield f"{prefix}.{name}_proj.bias", part
        yield f"{prefix}.o_proj.weight", self.out
        if self.out_bias is not None:
            yield f"{prefix}.o_proj.bias", self.out_bias
        norms = [norm.weight for norm in self.full_norms]
        if self.head_norm is not None:  # one weight of [head_dim], repeated for each head
            norms = self.head_norm.weight.split(self.heads[:2])
        for name, weight in zip("qk", norms, strict=False):
            yield f"{prefix}.{name}_norm.weight", weight

    def forward(self, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        qkv = F.linear(x, self.qkv, self.qkv_bias)
        if self.full_norms:
            for norm, part in zip(self.full_norms, qkv.split(self.widths, dim=-1), strict=False):
                part.copy_(norm.forward(part))
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.tensor_split([self.heads[0] + self.heads[1]], dim=1)
        if self.head_norm is not None:
            qk = self.head_norm.forward(qk)
        step.rotation(self.layer).apply_(qk)
        q, k = qk.tensor_split([self.heads[0]], dim=1)
        return F.linear(step.attend(self.layer, q, k, v, self.scale), self.out, self.out_bias)


class LatentAttention:
    """MLA in its absorbed form: all heads share one key, the latent vector with the rotated part behind it.

    The up-projections of keys and values are applied to queries and outputs instead, so the cache holds
    kv_lora_rank + qk_rope_head_dim numbers a token (https://arxiv.org/abs/2405.04434, section 2.1).
    """

    def __init__(self, g: ModelGeometry, mla: MlaGeometry, layer: int, allocate: Allocate) -> None:
        self.layer, self.num_heads, self.mla = layer, g.num_heads, mla
        key_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.scale = key_dim**-0.5 if g.attention_scale is None else g.attention_scale
        norm = partial(RmsNorm, allocate, eps=g.norm_eps)
        q_rows = g.num_heads * key_dim
        self.q_down = self.q_norm = None
        if mla.q_lora_rank is None:
            self.q_up = allocate(q_rows, g.hidden_size)
        else:
            self.q_down, self.q_norm = allocate(mla.q_lora_rank, g.hidden_size), norm(mla.q_lora_rank)
            self.q_up = allocate(q_rows, mla.q_lora_rank)
        self.kv_down = allocate(mla.kv_lora_rank + mla.qk_rope_head_dim, g.hidden_size)
        self.kv_norm = norm(mla.kv_lora_rank)
        self.kv_up = allocate(g.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        self.out = allocate(g.hidden_size, g.num_heads * mla.v_head_dim)
        up = self.kv_up.unflatten(0, (g.num_heads, -1))
        self.k_up, self.v_up = up.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)

    def tensors(self, prefix: str) -> NamedTensors:
        if self.q_down is None or self.q_norm is None:
            yield f"{prefix}.q_proj.weight", self.q_up
        else:
            yield f"{prefix}.q_a_proj.weight", self.q_down
            yield f"{prefix}.q_a_layernorm.weight", self.q_norm.weight
            yield f"{prefix}.q_b_proj.weight", self.q_up
        yield f"{prefix}.kv_a_proj_with_mqa.weight", self.kv_down
        yield f"{prefix}.kv_a_layernorm.weight", self.kv_norm.weight
        yield f"{prefix}.kv_b_proj.weight", self.kv_up
        yield f"{prefix}.o_proj.weight", self.out

    def forward(self, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        mla, rotation = self.mla, step.rotation(self.layer)
        compressed = x
        if self.q_down is not None and self.q_norm is not None:
            compressed = self.q_norm.forward(F.linear(x, self.q_down))
        q = F.linear(compressed, self.q_up).unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        rotation.apply_(q_rope)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.k_up).transpose(0, 1)

        k = F.linear(x, self.kv_down).unsqueeze(1)  # one key head
        latent, k_rope = k.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        latent.copy_(self.kv_norm.forward(latent))
        rotation.apply_(k_rope)

        out = step.attend(self.layer, torch.cat((q_latent, q_rope), dim=-1), k, latent, self.scale)
        out = torch.bmm(out.unflatten(-1, (self.num_heads, -1)).transpose(0, 1), self.v_up.transpose(1, 2))
        return F.linear(out.transpose(0, 1).flatten(1), self.out)
