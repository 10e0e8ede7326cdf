"""R3 inside the model: routers take the experts that the rollout engine took, weighted by their own scores.

Rows are addressed by absolute layer number, so dense first layers and pipeline stages shift nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from miles_core.batching.micro_batch import MicroBatch
from miles_core.routing_replay.alignment import OWN_CHOICE
from miles_core.trainer.megatron.model import PolicyModel


class CountingReplay(RouterReplay):
    """Replays where there is something to replay, and counts how often the router would have chosen the same."""

    def __init__(self) -> None:
        super().__init__()
        self.agreed: Tensor | int = 0  # on the device, so that counting waits for nothing
        self.total: Tensor | int = 0

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [rows, experts] -> values and numbers of the chosen experts, both [rows, topk]."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            replayed = self.target_topk_idx
            is_replayed = replayed[:, 0] != OWN_CHOICE
            agreed = (own.unsqueeze(-1) == replayed.unsqueeze(-2)).sum((-1, -2))
            self.agreed = self.agreed + (agreed * is_replayed).sum()
            self.total = self.total + is_replayed.sum() * topk
        elif self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            replayed = self.replay_backward_list.pop(0)
        else:
            return values, own
        chosen = torch.where(replayed == OWN_CHOICE, own, replayed)
        return scores.gather(1, chosen), chosen


class RoutingReplay:
    """The routers of this rank's pipeline stage."""

    def __init__(self, model: PolicyModel) -> None:
        self._by_layer: dict[int, CountingReplay] = {}
        for layer in model.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                replay = CountingReplay()
                layer.mlp.router.router_replay = replay
                self._by_layer[layer.layer_number - 1] = replay  # Megatron counts from 1
        # The class keeps every instance of the process in a list that we don't use.
        RouterReplay.clear_global_router_replay_instances()

    @contextmanager
    def of(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Within it the forward pass replays `micro_batch.routed_experts`; recomputation afterwards does the same."""
        assert micro_batch.routed_experts is not None
        # With tensor parallelism each rank's routers see an equal part of the sequence.
        parts = micro_batch.routed_experts.chunk(parallel_state.get_tensor_model_parallel_world_size())
        routes = parts[parallel_state.get_tensor_model_parallel_rank()]
        for layer, replay in self._by_layer.items():
            replay.set_target_indices(routes[:, layer].long())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for replay in self._by_layer.values():
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def finish(self) -> dict[str, float]:
        """Forgets all routes. Returns how many choices agreed and how many there were, since the last call."""
        counts = {"agreed": 0.0, "total": 0.0}
        for replay in self._by_layer.values():
            replay.clear_indices()
            replay.clear_router_replay_action()
            counts["agreed"] += float(replay.agreed)
            counts["total"] += float(replay.total)
            replay.agreed = replay.total = 0
        return counts
