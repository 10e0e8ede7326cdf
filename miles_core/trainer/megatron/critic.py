"""PPO's critic: a value model on the same ranks and in the same layout as the policy."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from miles_core.algorithms.value_objective import ValueInputs, value_objective
from miles_core.batching.micro_batch import MicroBatch
from miles_core.config.run import RunConfig
from miles_core.device import current_device
from miles_core.seeds import derive_seed
from miles_core.trainer.megatron import checkpoint as checkpoints
from miles_core.trainer.megatron.context import join_scored
from miles_core.trainer.megatron.forward_backward import ModelPass, data_parallel
from miles_core.trainer.megatron.model import PolicyModel
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig
from miles_core.trainer.megatron.optimizer import ModelOptimizer
from miles_core.trainer.megatron.routing_replay import RoutingReplay

_HEAD_STD = 0.02
_FOLDER = "critic"  # inside a checkpoint


class ValueModel(PolicyModel):
    """The policy's decoder with a scalar head, fp32 [hidden], in place of the output layer."""

    post_process: bool  # set by GPTModel

    def add_value_head(self, seed: int) -> None:
        """After the weights were read: the checkpoint of a policy has no such head."""
        if not self.post_process:
            return
        if not self.geometry.tie_embeddings:  # a tied one is the embedding's copy, which stages keep equal
            self.output_layer = None
            self.post_process = False
        generator = torch.Generator().manual_seed(seed)
        head = torch.empty(self.geometry.hidden_size).normal_(std=_HEAD_STD, generator=generator)
        self.value_head = torch.nn.Parameter(head.to(current_device()))

    def values(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Values before the response tokens, from the decoder's hidden states; float32 [N], the same on all ranks of a
        model replica."""
        if self.config.sequence_parallel:
            # Every rank computes all values: their gradients are equal, and adding them up would count them twice.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values = hidden.flatten(0, 1).index_select(0, micro_batch.logit_positions).float() @ self.value_head
        return join_scored(values, micro_batch.scored, len(micro_batch.targets))


class Critic:
    """Model, optimizer and passes of the critic, as MegatronTrainer holds those of the policy.

    Args:
        config: the run.
        megatron_config: of this model alone, without MTP layers.
        weights: torch_dist folder of the policy, from which the decoder starts.
    """

    def __init__(self, config: RunConfig, megatron_config: DecoderConfig | LatentDecoderConfig, weights: Path) -> None:
        self._algorithm = config.algorithm
        self._model = ValueModel(megatron_config, mtp_num_layers=0).to(current_device())
        checkpoints.load_weights(self._model, weights)
        self._model.add_value_head(derive_seed(config.seed, "value_head"))
        ddp = data_parallel(self._model, config.trainer)
        self.optimizer = ModelOptimizer(ddp, config.trainer.critic_optimizer or config.trainer.optimizer)
        replay = RoutingReplay(self._model) if megatron_config.moe_enable_routing_replay else None
        self.passes = ModelPass(ddp, replay)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Value before each response token, float32 [N] for each micro-batch. No gradient."""

        def result(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            values = self._model.values(hidden, micro_batch)
            return values.sum(), values

        return self.passes.forward(micro_batches, result)

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """Leaves the gradients of the value loss in the model's buffers; metrics add up as those of the policy."""

        def loss(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            old_values, returns = micro_batch.old_values, micro_batch.returns
            assert old_values is not None and returns is not None, "the loop gives both to a run with a critic"
            values = self._model.values(hidden, micro_batch)
            inputs = ValueInputs(values, old_values, returns, micro_batch.loss_mask, micro_batch.loss_weights)
            return value_objective(inputs, self._algorithm)

        return self.passes.backward(micro_batches, loss)

    def save(self, folder: Path) -> None:
        """Writes model and optimizer beside the policy's. Collective."""
        checkpoints.save(folder / _FOLDER, self._model, self.optimizer, None)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, at whatever layout. Collective."""
        checkpoints.load(folder / _FOLDER, self._model, self.optimizer, None)
