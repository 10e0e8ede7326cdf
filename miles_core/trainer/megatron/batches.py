"""This rank's part of a batch, and how the parts of all ranks come together again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conversion.geometry import ModelGeometry
from miles_core.batching.context import context_part
from miles_core.batching.micro_batch import MicroBatch, build_micro_batch
from miles_core.batching.sharding import plan_micro_batches
from miles_core.config.run import RunConfig
from miles_core.device import current_device
from miles_core.routing_replay.alignment import check_routes, with_routes
from miles_core.trainer.megatron.parallel import Place
from miles_core.types import TrainSample


class Batches:
    """Cuts batches into this rank's micro-batches. Collective: every rank makes the same calls."""

    def __init__(self, config: RunConfig, geometry: ModelGeometry, place: Place, *, replays: bool) -> None:
        self._config, self._geometry, self._place, self._replays = config, geometry, place, replays

    def cut(self, batch: Sequence[TrainSample]) -> list[MicroBatch]:
        """Micro-batches of one optimizer step, on the device, with routes where they are replayed."""
        trainer = self._config.trainer
        if self._replays:
            check_routes(batch, self._geometry)
        passes = plan_micro_batches(
            [len(s.tokens) for s in batch],
            data_size=self._place.data_size,
            micro_batch_size=trainer.micro_batch_size,
        )
        micro_batches = []
        for plans in passes:
            micro_batch = build_micro_batch(
                batch,
                plans[self._place.data_rank],
                packing=trainer.packing,
                length_multiple=trainer.parallel.tensor * trainer.parallel.context,
            )
            if self._replays:
                micro_batch = with_routes(micro_batch, batch)
            micro_batch = context_part(micro_batch, self._place.context_rank, trainer.parallel.context)
            micro_batches.append(micro_batch.to(current_device()))
        return micro_batches

    def per_token(
        self, batch: Sequence[TrainSample], run: Callable[[list[MicroBatch]], list[Tensor]]
    ) -> list[np.ndarray]:
        """What `run` gives for the response tokens, float32 [N] a micro-batch, as float32 [R] of each sample.

        The batch is cut where optimizer steps will cut it, so that a model that hasn't changed gives its next step the
        very same values, bit for bit.
        """
        ends = np.cumsum([s.response_length for s in batch])
        flat = torch.zeros(int(ends[-1]) if len(ends) else 0, device=current_device())
        step = self._config.global_batch_size
        for start in range(0, len(batch), step):
            micro_batches = self.cut(batch[start : start + step])
            results = run(micro_batches)
            if not self._place.speaks_for_its_data:
                continue
            for micro_batch, result in zip(micro_batches, results, strict=True):
                for sample, values in zip(micro_batch.samples, micro_batch.split(result), strict=True):
                    end = int(ends[start + sample])
                    flat[end - len(values) : end] = values
        dist.all_reduce(flat)  # each token is set on one rank and 0 on all others
        return np.split(flat.cpu().numpy(), ends[:-1])

    def totals(self, metrics: Sequence[Mapping[str, Tensor]], counts: Mapping[str, float]) -> dict[str, float]:
        """Sums over micro-batches and ranks: `metrics` of those ranks that hold results, `counts` of every rank."""
        mine: dict[str, float] = _added_up(metrics) if self._place.speaks_for_its_data else {}
        mine |= counts
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        total: dict[str, float] = {}
        for sums in gathered:
            for name, value in sums.items():
                total[name] = total.get(name, 0.0) + value
        return total


def _added_up(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    if not metrics:
        return {}
    names = list(metrics[0])
    values = torch.stack([torch.stack([m[name].float() for name in names]) for m in metrics]).double().sum(0)
    return dict(zip(names, values.tolist(), strict=True))
