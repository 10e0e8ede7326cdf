"""The Trainer on megatron-core. One object is one rank; every rank makes the same calls with the same arguments."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from conversion.families import rules_for
from conversion.geometry import ModelGeometry
from conversion.hf_to_torch_dist import HF_FOLDER, TENSORS_FILE
from conversion.mtp import megatron_mtp_layers
from conversion.quantization.formats import format_spec
from conversion.quantization.policy import quantized_names
from conversion.torch_dist_reader import TorchDistFolder
from miles_core.algorithms.objective import finalize_metrics
from miles_core.algorithms.value_objective import finalize_value_metrics
from miles_core.config.run import RunConfig
from miles_core.device import current_device
from miles_core.precision.fp8 import require_fp8_kernels
from miles_core.precision.fp8_products import Fp8Products
from miles_core.precision.int4_qat import Int4AwareProducts, stored_dtype
from miles_core.precision.products import Products
from miles_core.trainer.megatron import checkpoint as checkpoints
from miles_core.trainer.megatron import parallel
from miles_core.trainer.megatron.batches import Batches
from miles_core.trainer.megatron.critic import Critic
from miles_core.trainer.megatron.forward_backward import ModelPass, PolicyPass, data_parallel
from miles_core.trainer.megatron.linear import use_products
from miles_core.trainer.megatron.model import PolicyModel
from miles_core.trainer.megatron.model_config import transformer_config
from miles_core.trainer.megatron.mtp import MtpLoss
from miles_core.trainer.megatron.optimizer import ModelOptimizer
from miles_core.trainer.megatron.reference import ReferenceWeights
from miles_core.trainer.megatron.routing_replay import RoutingReplay
from miles_core.trainer.megatron.weights import WholeTensors
from miles_core.types import TrainSample

_NON_FINITE_BLOCKS = "fp8_non_finite_blocks"  # a metric


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
        train_mtp = config.trainer.mtp_loss_scale > 0
        if train_mtp and not mtp_num_layers:
            raise ValueError(
                f"trainer.mtp_loss_scale {config.trainer.mtp_loss_scale} trains MTP layers, but the checkpoint holds "
                "none: set it to 0"
            )
        geometry = replace(geometry, mtp_num_layers=mtp_num_layers)
        self._rules = rules_for(geometry, mtp_num_layers)
        self._hf_dtypes = _hf_dtypes(checkpoint)
        replays = config.trainer.routing_replay and geometry.moe is not None and not config.algorithm.is_supervised
        transformer = partial(transformer_config, geometry, config.trainer, routing_replay=replays)
        policy_config = transformer(mtp_num_layers=mtp_num_layers)
        place = parallel.join(
            config.trainer, rank=rank, world_size=world_size, init_method=init_method, seed=config.seed
        )
        try:
            self._batches = Batches(config, geometry, place, replays=replays)
            model = PolicyModel(policy_config, mtp_num_layers=mtp_num_layers, train_mtp=train_mtp)
            self._build_policy(model, stored.folder)
            self._critic = None
            if config.algorithm.needs_critic:
                self._critic = Critic(config, transformer(mtp_num_layers=0), stored.folder)
        except BaseException:
            parallel.leave()
            raise

    def _products(self) -> Products | None:
        """How the policy's linear layers and experts multiply (those of a critic do so plainly); None: plainly."""
        if self._config.trainer.fp8:
            require_fp8_kernels()
            return Fp8Products()
        if not self._config.trainer.qat:
            return None
        quantize = self._config.quantize
        spec = format_spec(quantize.format, quantize.group_size)
        shapes = {name: shape for rule in self._rules for name, shape in rule.hf_shapes().items()}
        return Int4AwareProducts(spec, stored_dtype(quantized_names(shapes, spec.format), self._hf_dtypes))

    def _build_policy(self, model: PolicyModel, weights: Path) -> None:
        config = self._config
        self._model = model.to(current_device())
        self._policy_products = self._products()
        if self._policy_products is not None:
            use_products(self._model, self._policy_products)
        checkpoints.load_weights(self._model, weights)
        ddp = data_parallel(self._model, config.trainer)
        temperature, scale = config.rollout.sampling.temperature, config.trainer.mtp_loss_scale
        mtp = MtpLoss(model, scale, config.trainer.mtp_detach, temperature) if scale else None
        drafts = model.draft_parameters() if mtp else None
        self._optimizer = ModelOptimizer(ddp, config.trainer.optimizer, apart=drafts)
        self._reference = ReferenceWeights(self._model) if config.algorithm.needs_reference else None
        replay = RoutingReplay(self._model) if self._model.config.moe_enable_routing_replay else None
        self._pass = PolicyPass(ModelPass(ddp, replay), self._model, config.algorithm, temperature, mtp)

    def log_probs(self, batch: Sequence[TrainSample], model: Literal["policy", "reference"]) -> list[np.ndarray]:
        """Log-probs of the response tokens, float32 [R] each; see `Batches.per_token`.

        Raises:
            ValueError: the reference is asked for and the algorithm needs none.
        """
        if model == "policy":
            return self._batches.per_token(batch, self._pass.log_probs)
        if self._reference is None:
            raise ValueError("no reference model is held: set algorithm.kl_loss_coef or algorithm.kl_coef above 0")
        with self._reference.in_place_of_policy():
            return self._batches.per_token(batch, self._pass.log_probs)

    def values(self, batch: Sequence[TrainSample]) -> list[np.ndarray]:
        """The critic's value before each response token, float32 [R] each.

        Raises:
            ValueError: the algorithm has no critic.
        """
        return self._batches.per_token(batch, self._held_critic().values)

    def train_step(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        """One optimizer step; see the protocol. `train/routing_replay_overlap` is the share of replayed expert choices
        that the trainer's own routers would have made, `train/mtp_1_agreement` the share of tokens that the first MTP
        layer predicts as the main head does."""
        sums = self._pass.gradients(self._batches.cut(batch))
        counts = self._pass.passes.replay_counts() | self._non_finite_blocks()
        metrics = self._step(sums, counts, self._optimizer, finalize_metrics)
        return {f"train/{name}": value for name, value in metrics.items()}

    def train_critic(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        """One step of the critic's optimizer; see the protocol.

        Raises:
            ValueError: the algorithm has no critic.
        """
        critic = self._held_critic()
        sums = critic.gradients(self._batches.cut(batch))
        metrics = self._step(sums, critic.passes.replay_counts(), critic.optimizer, finalize_value_metrics)
        return {f"train/critic-{name}": value for name, value in metrics.items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names, in the number format of the model's folder. Those that need no
        gathering share memory with the parameters: valid until the next step."""
        return WholeTensors(self._model).to_hf(self._rules, self._hf_dtypes)

    def refresh_reference(self) -> None:
        """Sets the reference model, if there is one, to the policy's present weights."""
        if self._reference is not None:
            self._reference.refresh()

    def save(self, folder: Path) -> None:
        """Writes model, optimizer, steps, RNG state, the reference model where the run refreshes it, and the critic."""
        refreshed = self._config.algorithm.ref_update_interval is not None
        checkpoints.save(folder, self._model, self._optimizer, self._reference if refreshed else None)
        if self._critic is not None:
            self._critic.save(folder)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, also at another parallel layout."""
        checkpoints.load(folder, self._model, self._optimizer, self._reference)
        if self._critic is not None:
            self._critic.load(folder)

    def close(self) -> None:
        """Leaves the process groups."""
        parallel.leave()

    def _held_critic(self) -> Critic:
        if self._critic is None:
            raise ValueError("no critic is held: set algorithm.advantage_estimator=ppo")
        return self._critic

    def _non_finite_blocks(self) -> dict[str, float]:
        """Blocks with NaN or infinity in FP8 products since the last step. Their step is refused: NaN reaches the
        gradients."""
        products = self._policy_products
        return {_NON_FINITE_BLOCKS: float(products.take_non_finite())} if isinstance(products, Fp8Products) else {}

    def _step(
        self,
        gradient_metrics: Sequence[Mapping[str, Tensor]],
        counts: Mapping[str, float],
        optimizer: ModelOptimizer,
        finalize: Callable[[Mapping[str, float]], dict[str, float]],
    ) -> dict[str, float]:
        """Applies the gradients that the passes left; metrics of the whole batch."""
        sums = self._batches.totals(gradient_metrics, counts)
        result = optimizer.step()
        agreed, total = sums.pop("agreed", 0.0), sums.pop("total", 0.0)
        non_finite_blocks = sums.pop(_NON_FINITE_BLOCKS, None)
        metrics = finalize(sums)
        metrics |= {"grad_norm": result.grad_norm, "lr-pg_0": result.lr, "skipped_steps": float(not result.applied)}
        if result.apart_grad_norm is not None:
            metrics["mtp_grad_norm"] = result.apart_grad_norm
        if non_finite_blocks is not None:
            metrics[_NON_FINITE_BLOCKS] = non_finite_blocks
        if total:
            metrics["routing_replay_overlap"] = agreed / total
        return metrics


def _hf_dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    tensors = json.loads((checkpoint / HF_FOLDER / TENSORS_FILE).read_text())["tensors"]
    return {name: getattr(torch, tensor["dtype"]) for name, tensor in tensors.items()}
