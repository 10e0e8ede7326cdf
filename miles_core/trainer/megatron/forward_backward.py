"""Forward and backward passes of a batch through megatron-core's schedules, pipelined or not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miles_core.algorithms.objective import ObjectiveInputs, policy_objective
from miles_core.batching.micro_batch import MicroBatch
from miles_core.config.algorithm import AlgorithmConfig
from miles_core.config.trainer import TrainerConfig
from miles_core.trainer.megatron.context import join_scored
from miles_core.trainer.megatron.log_probs import TokenScores, token_log_probs
from miles_core.trainer.megatron.model import PolicyModel
from miles_core.trainer.megatron.mtp import MtpLoss
from miles_core.trainer.megatron.routing_replay import RoutingReplay

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Any]]
Result = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, hidden states of the last stage) -> share in the loss, and what to hand back."""


@dataclass(frozen=True)
class ModelPass:
    """Runs micro-batches through a model. On ranks without the last pipeline stage the results are empty lists."""

    ddp: DistributedDataParallel
    replay: RoutingReplay | None

    def forward(self, micro_batches: Sequence[MicroBatch], result: Result) -> list[Any]:
        """What `result` hands back for each micro-batch. No gradient."""
        with torch.no_grad():
            results = self._run(micro_batches, result, forward_only=True)
        self.replay_counts()  # only those of steps are reported
        return results

    def backward(self, micro_batches: Sequence[MicroBatch], result: Result) -> list[Any]:
        """The same; leaves the gradients of the added-up losses in the model's buffers, summed over all ranks."""
        self.ddp.zero_grad_buffer()
        return self._run(micro_batches, result, forward_only=False)

    def replay_counts(self) -> dict[str, float]:
        """Forgets the routes that were replayed; see `RoutingReplay.finish`. Empty where none are."""
        return self.replay.finish() if self.replay else {}

    def _run(self, micro_batches: Sequence[MicroBatch], result: Result, *, forward_only: bool) -> list[Any]:
        def loss(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, handed_back = result(micro_batch, hidden)
            return value, _NO_TOKENS, handed_back

        def forward_step(iterator: Iterator[MicroBatch], _: DistributedDataParallel) -> tuple[Tensor, LossFunction]:
            micro_batch = next(iterator)
            with self.replay.of(micro_batch) if self.replay else nullcontext():
                hidden = self.ddp.module.run(micro_batch)
            return hidden, partial(loss, micro_batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=micro_batches[0].tokens.shape[0],
            forward_only=forward_only,
        )


@dataclass(frozen=True)
class PolicyPass:
    """Log-probs of the policy, and the gradients of its loss."""

    passes: ModelPass
    model: PolicyModel
    algorithm: AlgorithmConfig
    temperature: float
    mtp: MtpLoss | None = None

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs of the response tokens, float32 [N] for each micro-batch. No gradient."""

        def result(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            log_probs = self._scored(micro_batch, hidden, micro_batch.targets.unsqueeze(-1)).log_probs
            return log_probs.sum(), log_probs.squeeze(-1)

        return self.passes.forward(micro_batches, result)

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """Leaves the gradients of the batch's loss in the model's buffers.

        Returns the objective's metrics of each micro-batch, which add up over micro-batches and data-parallel ranks.
        """

        def loss(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            scored = micro_batch.targets.unsqueeze(-1)
            if micro_batch.teacher_top_k_ids is not None:
                scored = torch.cat([scored, micro_batch.teacher_top_k_ids], dim=-1)
            scores = self._scored(
                micro_batch,
                hidden,
                scored,
                with_entropy=self.algorithm.entropy_coef > 0,
                with_top=self.mtp is not None,
            )
            value, metrics = policy_objective(_objective_inputs(micro_batch, scores), self.algorithm)
            if self.mtp is None or scores.top_tokens is None:
                return value, metrics
            mtp_value, mtp_metrics = self.mtp(micro_batch, hidden, scores.top_tokens)
            return value + mtp_value, metrics | mtp_metrics

        return self.passes.backward(micro_batches, loss)

    def _scored(
        self,
        micro_batch: MicroBatch,
        hidden: Tensor,
        token_ids: Tensor,
        *,
        with_entropy: bool = False,
        with_top: bool = False,
    ) -> TokenScores:
        rows = self.model.output_inputs(hidden).index_select(0, micro_batch.logit_positions)
        geometry, scored, count = self.model.geometry, micro_batch.scored, len(token_ids)
        scores = token_log_probs(
            rows,
            self.model.output_weight(),
            token_ids if scored is None else token_ids[scored],
            temperature=self.temperature,
            vocab_size=geometry.vocab_size,
            logit_softcap=geometry.logit_softcap,
            with_entropy=with_entropy,
            with_top=with_top,
            exact=self.model.config.exact,
        )

        def joined(part: Tensor | None) -> Tensor | None:
            return None if part is None else join_scored(part, scored, count)

        return TokenScores(
            join_scored(scores.log_probs, scored, count), joined(scores.entropy), joined(scores.top_tokens)
        )


# What our loss functions report as the number of tokens: the loss is weighted already, so nothing may divide by it.
_NO_TOKENS = torch.zeros([], dtype=torch.int)


def data_parallel(model: PolicyModel, trainer: TrainerConfig) -> DistributedDataParallel:
    """The model with gradient buffers that add up over ranks."""
    config = model.config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=trainer.gradient_precision == "fp32",
        use_distributed_optimizer=trainer.distributed_optimizer,
    )
    ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    config.finalize_model_grads_func = _sum_gradients
    config.no_sync_func = ddp.no_sync
    return ddp


def _sum_gradients(model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """`finalize_model_grads` that adds up over ranks and divides by nothing."""
    finalize_model_grads(model, None, **kwargs)


def _objective_inputs(micro_batch: MicroBatch, scores: TokenScores) -> ObjectiveInputs:
    """`scores.log_probs` [N, 1 + k] are those of the response tokens and of the teacher's likeliest ones."""
    of_targets, old_log_probs = scores.log_probs[:, 0], micro_batch.old_log_probs
    return ObjectiveInputs(
        log_probs=of_targets,
        entropy=scores.entropy,
        old_log_probs=of_targets.detach() if old_log_probs is None else old_log_probs,
        rollout_log_probs=micro_batch.rollout_log_probs,
        ref_log_probs=micro_batch.ref_log_probs,
        advantages=micro_batch.advantages,
        loss_mask=micro_batch.loss_mask,
        loss_weights=micro_batch.loss_weights,
        sequence_ids=micro_batch.sequence_ids,
        top_k_log_probs=None if micro_batch.teacher_top_k_ids is None else scores.log_probs[:, 1:],
        teacher_top_k_log_probs=micro_batch.teacher_top_k_log_probs,
    )
