"""Forward and backward passes of a batch through megatron-core's schedules, pipelined or not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miles_core.algorithms.objective import ObjectiveInputs, policy_objective
from miles_core.batching.micro_batch import MicroBatch
from miles_core.config.algorithm import AlgorithmConfig
from miles_core.trainer.megatron.log_probs import token_log_probs
from miles_core.trainer.megatron.model import PolicyModel
from miles_core.trainer.megatron.routing_replay import RoutingReplay

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Any]]


@dataclass(frozen=True)
class PolicyPass:
    """Runs micro-batches through the model. On ranks without the last pipeline stage the results are empty lists."""

    ddp: DistributedDataParallel
    model: PolicyModel
    algorithm: AlgorithmConfig
    temperature: float
    replay: RoutingReplay | None

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs of the response tokens, float32 [N] for each micro-batch. No gradient."""

        def result(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            log_probs, _ = self._scored(micro_batch, hidden, with_entropy=False)
            return log_probs.sum(), _NO_TOKENS, log_probs

        with torch.no_grad():
            return self._run(micro_batches, result, forward_only=True)

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """Adds the gradients of the batch's loss to the model's buffers, summed over all ranks.

        Returns the objective's metrics of each micro-batch, which add up over micro-batches and data-parallel ranks.
        """

        def loss(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            log_probs, entropy = self._scored(micro_batch, hidden, with_entropy=self.algorithm.entropy_coef > 0)
            value, metrics = policy_objective(_objective_inputs(micro_batch, log_probs, entropy), self.algorithm)
            return value, _NO_TOKENS, metrics

        self.ddp.zero_grad_buffer()
        return self._run(micro_batches, loss, forward_only=False)

    def _scored(self, micro_batch: MicroBatch, hidden: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        rows = self.model.output_inputs(hidden).index_select(0, micro_batch.logit_positions)
        geometry = self.model.geometry
        return token_log_probs(
            rows,
            self.model.output_weight(),
            micro_batch.targets,
            temperature=self.temperature,
            vocab_size=geometry.vocab_size,
            logit_softcap=geometry.logit_softcap,
            with_entropy=with_entropy,
        )

    def _run(self, micro_batches: Sequence[MicroBatch], result: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        def forward_step(iterator: Iterator[MicroBatch], _: DistributedDataParallel) -> tuple[Tensor, LossFunction]:
            micro_batch = next(iterator)
            with self.replay.of(micro_batch) if self.replay else nullcontext():
                hidden = self.model.run(micro_batch)
            return hidden, partial(result, micro_batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=micro_batches[0].tokens.shape[0],
            forward_only=forward_only,
        )


# What our loss functions report as the number of tokens: the loss is weighted already, so nothing may divide by it.
_NO_TOKENS = torch.zeros([], dtype=torch.int)


def sum_gradients(model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """`finalize_model_grads` that adds up over ranks and divides by nothing."""
    finalize_model_grads(model, None, **kwargs)


def _objective_inputs(micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor | None) -> ObjectiveInputs:
    old_log_probs = micro_batch.old_log_probs
    return ObjectiveInputs(
        log_probs=log_probs,
        entropy=entropy,
        old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
        rollout_log_probs=micro_batch.rollout_log_probs,
        ref_log_probs=micro_batch.ref_log_probs,
        advantages=micro_batch.advantages,
        loss_mask=micro_batch.loss_mask,
        loss_weights=micro_batch.loss_weights,
        sequence_ids=micro_batch.sequence_ids,
    )
