"""Routed experts of a rollout (R3) as rows of a micro-batch.

The engine gives one row for each token that it fed to the model, [T - 1, layers, top_k] with absolute layer numbers,
dense layers included. The trainer's pass has more rows: each sample's last token, and padding. There the trainer's
routers choose for themselves, as they would without replay: nothing scores those rows and no other token attends to
them, and so a replay of the trainer's own routes gives the very same numbers as none.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from conversion.geometry import ModelGeometry
from miles_core.batching.micro_batch import MicroBatch
from miles_core.types import TrainSample

OWN_CHOICE = -1  # instead of an expert's number


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


def with_routes(micro_batch: MicroBatch, batch: Sequence[TrainSample]) -> MicroBatch:
    """The micro-batch with `routed_experts`, int16 [S * B, layers, top_k]; `OWN_CHOICE` in rows that no engine fed."""
    layers, top_k = _routes(batch[0]).shape[1:]
    aligned = torch.full((micro_batch.tokens.numel(), layers, top_k), OWN_CHOICE, dtype=torch.int16)
    if micro_batch.samples:
        routes = np.concatenate([_routes(batch[i]) for i in micro_batch.samples])
        aligned[micro_batch.fed_rows] = torch.from_numpy(routes.astype(np.int16))
    return replace(micro_batch, routed_experts=aligned)


def _routes(sample: TrainSample) -> np.ndarray:
    assert sample.routed_experts is not None, "check_routes has passed"
    return sample.routed_experts
