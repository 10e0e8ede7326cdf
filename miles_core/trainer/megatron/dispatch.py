"""Tokens to experts and back on CPUs: rows moved by index.

megatron-core's allgather dispatcher selects by mask and adds up by an index for every *element*, which on a CPU takes
as long as a third of the experts' own work.
"""

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor, nn


class IndexedDispatcher(MoEAllGatherTokenDispatcher):
    """The allgather dispatcher; rows go to the experts in the same order, by expert and then by token."""

    routing_map: Tensor | None  # bool [t, experts], set by `token_dispatch`

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens [t, hidden], gate weights [t, experts] -> rows of the local experts [m, hidden], how many rows
        each expert has, their gate weights [m]."""
        assert self.routing_map is not None
        first, experts = self.local_expert_indices[0], self.num_local_experts
        local_probs = probs[:, first : first + experts]
        # The parent reads the dtype. Detached: the graph leads to Megatron's hooks and so to the whole model, a cycle
        # that would keep a closed trainer, its process groups and their threads for good.
        self.local_probs = local_probs.detach()
        chosen = self.routing_map[:, first : first + experts].T.contiguous()
        expert, token = chosen.nonzero(as_tuple=True)
        weights = local_probs.flatten().index_select(0, token * experts + expert)
        self._token, self._num_tokens = token, len(hidden_states)
        self.routing_map = None
        return hidden_states.index_select(0, token), chosen.sum(1), weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows [m, hidden], added up where they came from: [t, hidden]."""
        sums = torch.zeros(self._num_tokens, hidden_states.shape[1], dtype=hidden_states.dtype)
        return sums.index_add(0, self._token, hidden_states)


def use_indexed_dispatch(model: nn.Module) -> None:
    """Replaces the allgather dispatcher of each MoE layer; MoELayer has no option for it."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher):
            layer.token_dispatcher = IndexedDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )
