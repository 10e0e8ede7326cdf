"""The multi-token-prediction layers learn beside the policy, so that speculative decoding keeps its acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.algorithms.mtp import mtp_objective
from miles_core.batching.micro_batch import MicroBatch
from miles_core.trainer.megatron.log_probs import token_log_probs
from miles_core.trainer.megatron.model import PolicyModel


@dataclass(frozen=True)
class MtpLoss:
    """loss_scale / layers * sum over layers of the cross-entropy at their depth (DeepSeek-V3, section 2.2).

    Where detached, what the layers share with the policy (hidden states, embedding, output layer) is a constant to
    them: its gradients are, bit for bit, those of a run without this loss.
    """

    model: PolicyModel
    loss_scale: float
    detach: bool
    temperature: float

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor, top_tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of a micro-batch in the loss, and metrics that add up.

        Args:
            hidden: [S, B, hidden], the decoder's.
            top_tokens: int64 [N], the main head's likeliest tokens in place of the response tokens.
        """
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for depth, state in enumerate(self.model.draft_states(micro_batch, hidden, detach=self.detach), start=1):
            positions, exists = micro_batch.earlier_positions(depth)
            geometry, weight = self.model.geometry, self.model.output_weight()
            scores = token_log_probs(
                self.model.output_inputs(state).index_select(0, positions),
                weight.detach() if self.detach else weight,
                micro_batch.targets.unsqueeze(-1),
                temperature=self.temperature,
                vocab_size=geometry.vocab_size,
                logit_softcap=geometry.logit_softcap,
                with_top=True,
            )
            assert scores.top_tokens is not None
            loss, of_depth = mtp_objective(
                scores.log_probs.squeeze(-1),
                scores.top_tokens.eq(top_tokens),
                micro_batch.loss_mask & exists,
                micro_batch.loss_weights,
                depth=depth,
            )
            losses.append(loss)
            metrics |= of_depth
        return self.loss_scale * torch.stack(losses).mean(), metrics
