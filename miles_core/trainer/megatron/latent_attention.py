"""Multi-head latent attention (DeepSeek-V2, 2405.04434) with rotation in our core attention."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from miles_core.trainer.megatron.packing import PackedSequences


class LatentAttention(MLASelfAttention):
    """megatron-core's own rotates packed sequences one by one, waits for their lengths, and without Transformer Engine
    does not add up the gradient of the rotary key, which all heads share, over tensor-parallel ranks."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        inference_context: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """[s / t, b, hidden] -> queries, keys [s, b, heads, d], values [s, b, heads, dv], the last dims of queries and
        keys not rotated yet; and the latent queries, keys and values. Without b where sequences are packed."""
        config, heads = self.config, self.num_attention_heads_per_partition
        q_latent = hidden_states
        if config.q_lora_rank is not None:
            q_latent = self._sequence_part(self._whole(self.linear_q_down_proj(hidden_states)[0]))
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        kv_latent, rotary_key = self._whole(self.linear_kv_down_proj(hidden_states)[0]).split(widths, dim=-1)
        kv_latent = self._sequence_part(kv_latent)
        if config.tensor_model_parallel_size > 1:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key)
        if packed_seq_params is not None:
            q_latent, kv_latent, rotary_key = (x.squeeze(1) for x in (q_latent, kv_latent, rotary_key))

        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(q_latent)
        else:
            q_latent = self.q_layernorm(q_latent)
            query, _ = self.linear_q_up_proj(q_latent)
        kv_latent = self.kv_layernorm(kv_latent)
        kv, _ = self.linear_kv_up_proj(kv_latent)
        plain_key, value = kv.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        rotary_key = rotary_key.unsqueeze(-2).expand(*plain_key.shape[:-1], -1)
        key = torch.cat([plain_key, rotary_key], dim=-1)
        return query.unflatten(-1, (heads, -1)), key, value, q_latent, kv_latent

    def _whole(self, columns: Tensor) -> Tensor:
        """Columns of this tensor-parallel rank -> all columns, on each rank."""
        parallel = self.config.tensor_model_parallel_size > 1
        return gather_from_tensor_model_parallel_region(columns) if parallel else columns

    def _sequence_part(self, latent: Tensor) -> Tensor:
        """The next projection wants its rank's part of the sequence again, where that is split."""
        return scatter_to_sequence_parallel_region(latent) if self.config.sequence_parallel else latent
