"""Routed experts of a rollout (R3) as rows of a micro-batch.

The engine gives one row for each token that it fed to the model, [T - 1, layers, top_k] with absolute layer numbers,
dense layers included. The trainer's pass has more rows: each sample's last token, and padding. Those are sent to
arbitrary valid experts; their hidden states are never scored and no other token attends to them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from conversion.geometry import ModelGeometry
from miles_core.batching.micro_batch import MicroBatch
from miles_core.types import TrainSample


class RoutingReplayError(ValueError):
    """Recorded routes that do not fit the model or the batch."""


def check_routes(batch: Sequence[TrainSample], geometry: ModelGeometry) -> None:
    """Refuses a batch that could be replayed only in part.

    Raises:
        RoutingReplayError: a sample has no routes, routes of another shape than [T - 1, layers, top_k], or an expert
            that the model does not have; names the sample.
    """
    moe = geometry.moe
    assert moe is not None, "routing replay concerns models with experts"
    moe_layers = np.flatnonzero(moe.is_moe_layer)
    for sample in batch:
        routes = sample.routed_experts
        if routes is None:
            raise RoutingReplayError(
                f"sample {sample.index} has no routed_experts, trainer.routing_replay=true needs them for every "
                "sample: let the rollout engine record them, or set trainer.routing_replay=false"
            )
        expected = (len(sample.tokens) - 1, geometry.num_layers, moe.top_k)
        if routes.shape != expected:
            raise RoutingReplayError(
                f"sample {sample.index}: routed_experts has shape {routes.shape}, its {len(sample.tokens)} tokens and "
                f"the model need {expected} = [tokens - 1, layers, top_k]"
            )
        used = routes[:, moe_layers]
        if used.size and (used.min() < 0 or used.max() >= moe.num_experts):
            wrong = int(used.min() if used.min() < 0 else used.max())
            raise RoutingReplayError(
                f"sample {sample.index}: routed_experts holds expert {wrong}, the model has experts 0 to "
                f"{moe.num_experts - 1}"
            )


def with_routes(micro_batch: MicroBatch, batch: Sequence[TrainSample], num_experts: int) -> MicroBatch:
    """The micro-batch with `routed_experts`, int16 [S * B, layers, top_k].

    Rows that no sample feeds get experts (row + 0, row + 1, ...) modulo `num_experts`: distinct, and spread evenly.
    """
    routes = [_routes(batch[i]) for i in micro_batch.samples]
    layers, top_k = _routes(batch[0]).shape[1:]
    rows = torch.arange(micro_batch.tokens.numel())
    filler = (rows[:, None, None] + torch.arange(top_k)) % num_experts
    aligned = filler.expand(-1, layers, -1).to(torch.int16).contiguous()
    if routes:
        aligned[micro_batch.fed_rows] = torch.from_numpy(np.concatenate(routes).astype(np.int16))
    return replace(micro_batch, routed_experts=aligned)


def _routes(sample: TrainSample) -> np.ndarray:
    assert sample.routed_experts is not None, "check_routes has passed"
    return sample.routed_experts
