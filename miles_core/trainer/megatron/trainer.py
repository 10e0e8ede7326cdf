"""The Trainer on megatron-core. One object is one rank; every rank makes the same calls with the same arguments."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from conversion.families import rules_for
from conversion.geometry import ModelGeometry
from conversion.hf_to_torch_dist import HF_FOLDER, TENSORS_FILE
from conversion.mtp import megatron_mtp_layers
from conversion.torch_dist_reader import TorchDistFolder
from miles_core.algorithms.objective import finalize_metrics
from miles_core.batching.micro_batch import MicroBatch, build_micro_batch
from miles_core.batching.sharding import plan_micro_batches
from miles_core.config.run import RunConfig
from miles_core.device import current_device
from miles_core.routing_replay.alignment import check_routes, with_routes
from miles_core.trainer.megatron import checkpoint as checkpoints
from miles_core.trainer.megatron import parallel
from miles_core.trainer.megatron.forward_backward import PolicyPass, sum_gradients
from miles_core.trainer.megatron.model import PolicyModel
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig, transformer_config
from miles_core.trainer.megatron.optimizer import PolicyOptimizer
from miles_core.trainer.megatron.reference import ReferenceWeights
from miles_core.trainer.megatron.routing_replay import RoutingReplay
from miles_core.trainer.megatron.weights import WholeTensors
from miles_core.types import TrainSample


class MegatronTrainer:
    """See miles_core/trainer/trainer.py for the calls.

    Args:
        config: the run.
        geometry: shape of the model.
        rank: of this process.
        world_size: number of processes, `trainer.num_ranks`.
        init_method: where ranks meet, as torch.distributed takes it ("tcp://HOST:PORT", "file:///PATH").
        checkpoint: folder that conversion/hf_to_torch_dist.py made: initial weights, and what Hugging Face tensors the
            model has.

    Raises:
        ValueError: the model or its parallel layout cannot be held (see model_config.py).
    """

    def __init__(
        self,
        config: RunConfig,
        geometry: ModelGeometry,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        checkpoint: Path,
    ) -> None:
        self._config = config
        stored = TorchDistFolder(checkpoint)
        mtp_num_layers = megatron_mtp_layers(stored.names)
        geometry = replace(geometry, mtp_num_layers=mtp_num_layers)
        self._geometry = geometry
        self._rules = rules_for(geometry, mtp_num_layers)
        self._hf_dtypes = _hf_dtypes(checkpoint)
        replays = config.trainer.routing_replay and geometry.moe is not None

        megatron_config = transformer_config(
            geometry, config.trainer, mtp_num_layers=mtp_num_layers, routing_replay=replays
        )
        self._place = parallel.join(
            config.trainer, rank=rank, world_size=world_size, init_method=init_method, seed=config.seed
        )
        try:
            self._build(megatron_config, mtp_num_layers, stored.folder)
        except BaseException:
            parallel.leave()
            raise

    def _build(self, megatron_config: DecoderConfig | LatentDecoderConfig, mtp_num_layers: int, weights: Path) -> None:
        config = self._config
        self._model = PolicyModel(megatron_config, mtp_num_layers=mtp_num_layers).to(current_device())
        checkpoints.load_weights(self._model, weights)
        ddp = DistributedDataParallel(
            config=megatron_config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            module=self._model,
        )
        megatron_config.finalize_model_grads_func = sum_gradients
        megatron_config.no_sync_func = ddp.no_sync
        self._optimizer = PolicyOptimizer(ddp, config.trainer)
        self._replay = RoutingReplay(self._model) if megatron_config.moe_enable_routing_replay else None
        self._reference = ReferenceWeights(self._model) if config.algorithm.needs_reference else None
        self._pass = PolicyPass(ddp, self._model, config.algorithm, config.rollout.sampling.temperature, self._replay)

    def log_probs(self, batch: Sequence[TrainSample], model: Literal["policy", "reference"]) -> list[np.ndarray]:
        """Log-probs of the response tokens, float32 [R] each.

        The batch is cut where optimizer steps will cut it, so that a policy that hasn't changed gives `train_step` the
        very same values, bit for bit.

        Raises:
            ValueError: the reference is asked for and the algorithm needs none.
        """
        if model == "policy":
            return self._log_probs(batch)
        if self._reference is None:
            raise ValueError("no reference model is held: set algorithm.kl_loss_coef or algorithm.kl_coef above 0")
        with self._reference.in_place_of_policy():
            return self._log_probs(batch)

    def train_step(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        """One optimizer step; see the protocol. `train/routing_replay_overlap` is the share of replayed expert choices
        that the trainer's own routers would have made."""
        sums = _added_up(self._pass.gradients(self._micro_batches(batch)))
        sums = self._over_ranks(sums, self._replay.finish() if self._replay else {})
        result = self._optimizer.step()
        agreed, total = sums.pop("agreed", 0.0), sums.pop("total", 0.0)
        metrics = finalize_metrics(sums)
        metrics |= {"grad_norm": result.grad_norm, "lr-pg_0": result.lr, "skipped_steps": float(not result.applied)}
        if total:
            metrics["routing_replay_overlap"] = agreed / total
        return {f"train/{name}": value for name, value in metrics.items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names, in the number format of the model's folder. Those that need no
        gathering share memory with the parameters: valid until the next step."""
        return WholeTensors(self._model).to_hf(self._rules, self._hf_dtypes)

    def refresh_reference(self) -> None:
        """Sets the reference model, if there is one, to the policy's present weights."""
        if self._reference is not None:
            self._reference.refresh()

    def save(self, folder: Path) -> None:
        """Writes model, optimizer, steps, RNG state, and the reference model where the run refreshes it."""
        refreshed = self._config.algorithm.ref_update_interval is not None
        checkpoints.save(folder, self._model, self._optimizer, self._reference if refreshed else None)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, also at another parallel layout."""
        checkpoints.load(folder, self._model, self._optimizer, self._reference)

    def close(self) -> None:
        """Leaves the process groups."""
        parallel.leave()

    def _log_probs(self, batch: Sequence[TrainSample]) -> list[np.ndarray]:
        ends = np.cumsum([s.response_length for s in batch])
        flat = torch.zeros(int(ends[-1]) if len(ends) else 0)
        step = self._config.global_batch_size
        for start in range(0, len(batch), step):
            micro_batches = self._micro_batches(batch[start : start + step])
            results = self._pass.log_probs(micro_batches)
            if not self._place.speaks_for_its_data:
                continue
            for micro_batch, result in zip(micro_batches, results, strict=True):
                for sample, values in zip(micro_batch.samples, micro_batch.split(result.cpu()), strict=True):
                    end = int(ends[start + sample])
                    flat[end - len(values) : end] = values
        if self._replay is not None:
            self._replay.finish()
        dist.all_reduce(flat)  # each token is set on one rank and 0 on all others
        return np.split(flat.numpy(), ends[:-1])

    def _micro_batches(self, batch: Sequence[TrainSample]) -> list[MicroBatch]:
        trainer = self._config.trainer
        if self._replay is not None:
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
                length_multiple=trainer.parallel.tensor,
            )
            if self._replay is not None and self._geometry.moe is not None:
                micro_batch = with_routes(micro_batch, batch, self._geometry.moe.num_experts)
            micro_batches.append(micro_batch.to(current_device()))
        return micro_batches

    def _over_ranks(self, objective: dict[str, float], of_stage: dict[str, float]) -> dict[str, float]:
        """Sums over all ranks: `objective` of those that hold results, `of_stage` of each pipeline stage."""
        mine: dict[str, float] = objective if self._place.speaks_for_its_data else {}
        if self._place.tensor_rank == 0:
            mine = mine | of_stage
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        total: dict[str, float] = {}
        for sums in gathered:
            for name, value in sums.items():
                total[name] = total.get(name, 0.0) + value
        return total


def _added_up(metrics: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    if not metrics:
        return {}
    names = list(metrics[0])
    values = torch.stack([torch.stack([m[name].float() for name in names]) for m in metrics]).double().sum(0)
    return dict(zip(names, values.tolist(), strict=True))


def _hf_dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    tensors = json.loads((checkpoint / HF_FOLDER / TENSORS_FILE).read_text())["tensors"]
    return {name: getattr(torch, tensor["dtype"]) for name, tensor in tensors.items()}
