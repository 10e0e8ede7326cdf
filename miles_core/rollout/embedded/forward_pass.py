"""The two ways tokens meet attention: whole prompts at once, or one token of each row against the cache."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from conversion.geometry import ModelGeometry
from miles_core.rollout.embedded.kv_cache import KVCache
from miles_core.rollout.embedded.rope import RopeTables, Rotation

Attention = Callable[..., torch.Tensor]
"""(q, k, v, visible, scale, softcap), shapes as of `softmax_attention`; visible is bool."""


class ForwardPass:
    """What the layers of one forward pass share. Tokens are flat: row-major over sequences, then positions."""

    def __init__(
        self, geometry: ModelGeometry, ropes: RopeTables, attention: Attention | None, positions: torch.Tensor
    ) -> None:
        """`positions` int64 [tokens]: of each token in its sequence. `attention` None: whichever is fastest."""
        self._geometry = geometry
        self._attention = attention
        full = ropes.full.at(positions)
        self._rotations = (full, full if ropes.sliding is ropes.full else ropes.sliding.at(positions))
        self._masks: dict[bool, torch.Tensor] = {}
        self.routes: list[torch.Tensor] = []  # of each MoE layer in turn, int64 [tokens, top_k]

    def rotation(self, layer: int) -> Rotation:
        return self._rotations[self._is_sliding(layer)]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of every token to itself and all before it in its sequence.

        Args:
            layer: decoder layer.
            q: [tokens, heads, key_dim].
            k: [tokens, kv_heads, key_dim].
            v: [tokens, kv_heads, value_dim].
            scale: factor on the products of q and k.

        Returns:
            [tokens, heads * value_dim].
        """
        raise NotImplementedError

    def recorded_routes(self) -> np.ndarray:
        """int16 [tokens, MoE layers, top_k], after the forward pass; empty for a dense model."""
        if not self.routes:
            return np.empty((0, 0, 0), dtype=np.int16)
        return torch.stack(self.routes, dim=1).to(torch.int16).cpu().numpy()

    def _mask(self, layer: int, build: Callable[[int | None], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """0 where a token may look, -inf elsewhere; booleans for an `attention` of its own. `build` gives the latter,
        for a window or for none."""
        sliding = self._is_sliding(layer)
        if sliding not in self._masks:
            visible = build(self._geometry.sliding_window if sliding else None)
            if self._attention is not None:
                self._masks[sliding] = visible
                return visible
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[sliding] = mask.masked_fill_(~visible, float("-inf"))
        return self._masks[sliding]

    def _is_sliding(self, layer: int) -> bool:
        return bool(self._geometry.is_sliding_layer) and self._geometry.is_sliding_layer[layer]


class PromptPass(ForwardPass):
    """Sequences from their first token, padded on the right, which a causal mask hides from all real tokens."""

    def __init__(
        self,
        geometry: ModelGeometry,
        ropes: RopeTables,
        num_sequences: int,
        length: int,
        attention: Attention | None = None,
        store: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """`length` is that of each sequence with its padding; `store(layer, keys, values)` receives
        [sequences, kv_heads, length, dim] of each layer."""
        positions = torch.arange(length, device=ropes.full.cos.device).repeat(num_sequences)
        super().__init__(geometry, ropes, attention, positions)
        self._num_sequences = num_sequences
        self._store = store

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (self._num_sequences, -1)).transpose(1, 2) for x in (q, k, v))
        if self._store is not None:
            self._store(layer, k, v)
        softcap, sliding = self._geometry.attention_softcap, self._is_sliding(layer)
        if self._attention is None and softcap is None and not sliding and k.shape[-1] == v.shape[-1]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            groups, length = q.shape[1] // k.shape[1], q.shape[2]
            mask = self._mask(layer, lambda window: _causal(length, window, q.device), q.dtype)
            out = (self._attention or softmax_attention)(
                q.unflatten(1, (-1, groups)).flatten(2, 3).flatten(0, 1),
                k.flatten(0, 1),
                v.flatten(0, 1),
                mask.repeat(groups, 1).unsqueeze(0),
                scale,
                softcap,
            ).view(self._num_sequences, -1, length, v.shape[-1])
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class DecodePass(ForwardPass):
    """The next token of each of the first rows of a cache."""

    def __init__(
        self,
        geometry: ModelGeometry,
        ropes: RopeTables,
        cache: KVCache,
        positions: torch.Tensor,
        num_columns: int,
        attention: Attention | None = None,
    ) -> None:
        """`positions` int64 [rows]: how many tokens each row holds; `num_columns`: their maximum + 1."""
        super().__init__(geometry, ropes, attention, positions)
        self._cache = cache
        self._positions = positions
        self._num_columns = num_columns
        self._slots = cache.slots_of(positions)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        rows, kv_heads = len(q), k.shape[1]
        self._cache.append(layer, self._slots, k, v)
        keys, values = self._cache.read(layer, rows, self._num_columns)
        mask = self._mask(layer, lambda window: self._visible(window, kv_heads), q.dtype)
        grouped = q.reshape(rows * kv_heads, -1, q.shape[-1])
        out = (self._attention or softmax_attention)(
            grouped, keys, values[..., : v.shape[-1]], mask, scale, self._geometry.attention_softcap
        )
        return out.view(rows, -1)

    def _visible(self, window: int | None, kv_heads: int) -> torch.Tensor:
        columns = torch.arange(self._num_columns, device=self._positions.device)
        positions = self._positions.unsqueeze(1)
        visible = columns <= positions
        if window is not None:
            visible &= columns > positions - window
        return visible.repeat_interleave(kv_heads, dim=0).unsqueeze(1)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """softmax(softcap(q k^T * scale) + mask) v by plain products.

    For one query a row this is faster on a CPU than the fused kernel (docs/performance-engine.md).

    Args:
        q: [batch, queries, key_dim]; the query heads that share a key head are queries.
        k: [batch, columns, key_dim].
        v: [batch, columns, value_dim].
        mask: added to the scores, broadcastable to [batch, queries, columns].
        scale: factor on q k^T.
        softcap: bound c of the scores, c * tanh(score / c); None for none.
    """
    if softcap is None:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap) + mask
    return torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype), v)


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible if window is None else visible.triu(1 - window)
