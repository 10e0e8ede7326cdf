"""Routed experts of one rank as two stacked weights, and the router that leaves its bias alone."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from miles_core.precision.products import PlainProducts, Products
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig


class FixedBiasRouter(TopKRouter):
    """TopKRouter whose expert bias is held fixed, so it need not count tokens for an update."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        pass


class GroupedExperts(MegatronModule):
    """Gated MLPs w2(act(gate(x)) * up(x)), one matrix product for all experts of the rank.

    Parameters: `fc1` [experts, 2 * width, hidden], gate first, and `fc2` [experts, hidden, width]. In a checkpoint each
    expert has its own keys, those of megatron-core's SequentialMLP.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: DecoderConfig | LatentDecoderConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.products: Products = PlainProducts()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.fc1 = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden, dtype=config.params_dtype))
        self.fc2 = nn.Parameter(torch.empty(num_local_experts, hidden, width, dtype=config.params_dtype))
        for weight in (self.fc1, self.fc2):
            # Gradients are summed over the ranks that hold the same experts, which need not be the data-parallel ones.
            weight.allreduce = False  # type: ignore[attr-defined]
            # Whole on each rank, yet every rank's counts in the gradient norm.
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [m, hidden] sorted by expert, int64 [experts] how many each has, gate weights [m] -> [m, hidden]."""
        ends = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        return self._mlps(ends, tokens, probs, self.fc1, self.fc2), None

    def _mlps(self, ends: Tensor, tokens: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        """Expert e has the rows from ends[e - 1] to ends[e]."""
        gate, up = self.products.grouped(tokens, fc1, ends).chunk(2, -1)
        hidden = self.config.activation_func(gate) * up
        # Scaling here instead of the output moves a factor through a linear map, over fewer elements.
        hidden = (hidden * probs.unsqueeze(-1)).to(tokens.dtype)
        return self.products.grouped(hidden, fc2, ends)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Keys of SequentialMLP under `singleton_local_shards`: one for each expert, two where gate and up are joined.

        Each parameter is one entry, cut up when it is written, so that the optimizer's state of it is cut up likewise.
        """
        assert not sharded_offsets, "layers have keys of their own (conversion/torch_dist_keys.py)"
        return {
            f"{prefix}fc1": _by_expert(f"{prefix}experts.{{}}.linear_fc1.weight", self.fc1, ("_w", "_v")),
            f"{prefix}fc2": _by_expert(f"{prefix}experts.{{}}.linear_fc2.weight", self.fc2, ("",)),
        }


def _by_expert(key: str, weight: Tensor, parts: tuple[str, ...]) -> ShardedTensorFactory:
    first = parallel_state.get_expert_model_parallel_rank() * len(weight)

    def build(key: str, weight: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(f"{key.format(first + i)}{part}", piece, replica_id=replica_id)
            for i, expert in enumerate(weight)
            for part, piece in zip(parts, expert.chunk(len(parts)), strict=True)
        ]

    def merge(pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces).view_as(weight)

    replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
    return ShardedTensorFactory(key, weight, build, merge, replica)
