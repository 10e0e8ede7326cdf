"""Core attention by torch's scaled_dot_product_attention, for every layout and head width that we train.

megatron-core's own local attention takes neither packed sequences, nor keys and values of different widths (latent
attention), nor caps on its scores.
"""

import functools
import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional as F

from conversion.geometry import RopeGeometry
from miles_core.batching.micro_batch import PackedLayout
from miles_core.trainer.megatron.context import heads_for_tokens, tokens_for_heads
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig
from miles_core.trainer.megatron.packing import PackedSequences, from_rows, to_rows
from miles_core.trainer.megatron.rope import Rotation


class CoreAttention(MegatronModule):
    """softmax(q k^T * scale) v, causal, each sequence for itself; grouped queries share their group's key and value.

    Queries and keys are rotated by their position here, where each sequence starts at place 0.

    Shapes, padded: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] -> [s, b, heads * dv].
    Packed: q [t, heads, d], k [t, groups, d], v [t, groups, dv] -> [t, heads * dv].
    """

    def __init__(
        self,
        config: DecoderConfig | LatentDecoderConfig,
        layer_number: int,
        **unused: Any,  # scale, mask and attention type, channel widths: known from the geometry or the tensors
    ) -> None:
        super().__init__(config=config)
        geometry = config.geometry
        assert geometry is not None
        scale = geometry.attention_scale
        self.scale = scale if scale is not None else 1 / math.sqrt(geometry.head_dim)
        self.softcap = geometry.attention_softcap
        layer = min(layer_number, geometry.num_layers) - 1  # Megatron counts from 1; MTP layers are like the last one
        slides = bool(geometry.is_sliding_layer) and geometry.is_sliding_layer[layer]
        self.window = geometry.sliding_window if slides else None
        rope = geometry.rope
        if slides and geometry.local_rope_theta is not None:
            rope = RopeGeometry(geometry.local_rope_theta, rope.rotary_dim)
        self.rotation = Rotation.of(rope, first_dim=geometry.mla.qk_nope_head_dim if geometry.mla else 0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> Tensor:
        split = self.config.context_parallel_size > 1
        if split:
            query, key, value = (heads_for_tokens(x) for x in (query, key, value))
        if packed_seq_params is None:
            out = self._attend_padded(query, key, value)
        else:
            layout = packed_seq_params.layout
            assert layout is not None
            out = self._attend_packed(query, key, value, layout)
        return (tokens_for_heads(out) if split else out).flatten(-2)

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[s, b, heads or groups, width] -> [s, b, heads, width of v]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._attend(q, k, v).permute(2, 0, 1, 3)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        """[t, heads or groups, width] -> [t, heads, width of v]."""
        q, k, v = (to_rows(x, layout).transpose(1, 2) for x in (query, key, value))
        return from_rows(self._attend(q, k, v).transpose(1, 2), layout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All [b, heads or groups, s, width]."""
        q, k = self.rotation.of_rows(q), self.rotation.of_rows(k)
        return self._attend_rotated(q, k, v)

    def _attend_rotated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        window = self.window if self.window is not None and self.window < length else None
        if self.softcap is not None:
            return _capped_attention(q, k, v, self.scale, self.softcap, causal_mask(length, window, q.device))
        mask = causal_mask(length, window, q.device) if window is not None else None
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )


@functools.lru_cache(maxsize=8)
def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, length], True where the query (row) sees the key: itself and the `window` - 1 tokens before it."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor) -> Tensor:
    """Scores pass cap * tanh(score / cap) before the mask (Gemma 2)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * scale / cap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v
