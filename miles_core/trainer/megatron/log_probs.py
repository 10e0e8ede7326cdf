"""Log-probs of response tokens from hidden states, without ever holding all logits.

A vocabulary of 150 thousand times 32 thousand tokens would be 20 GB in fp32. So logits are made for a chunk of tokens
at a time, and again in the backward pass.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles_core.exact import functions
from miles_core.exact.gradient import linear_with_gradient, valued

LOGITS_AT_ONCE = 2**27  # 512 MiB in fp32


class TokenScores(NamedTuple):
    """What N distributions over the vocabulary say; None: not asked for."""

    log_probs: Tensor  # fp32 [N, m], of m tokens each
    entropy: Tensor | None  # fp32 [N]
    top_tokens: Tensor | None  # int64 [N], the likeliest token; no gradient


def token_log_probs(
    hidden: Tensor,
    output_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    logit_softcap: float | None = None,
    with_entropy: bool = False,
    with_top: bool = False,
    exact: bool = False,
) -> TokenScores:
    """log softmax(hidden @ weight^T / temperature)[targets] in fp32, differentiable, with any tensor-parallel layout.

    Args:
        hidden: [N, hidden], the same on all tensor-parallel ranks.
        output_weight: [V / t, hidden], this rank's rows; rows from `vocab_size` on are padding.
        targets: int64 [N, m], m tokens of each distribution, in [0, vocab_size).
        temperature: of the rollout; divides the logits before the softmax.
        vocab_size: true size of the vocabulary.
        logit_softcap: logits pass cap * tanh(logit / cap) first (Gemma 2).
        with_entropy: also give the entropy of each distribution.
        with_top: also give the likeliest token of each.
        exact: log-probs are those of miles_core/exact/, and need the whole vocabulary on one rank.
    """

    whole = functions.weight_rows(output_weight.detach()) if exact else None

    def rows(hidden: Tensor, targets: Tensor) -> TokenScores:
        if whole is None:
            logits = torch.nn.functional.linear(hidden, output_weight).float()
        else:
            logits = linear_with_gradient(
                lambda x, _: functions.linear(x, whole, dtype=torch.float32), hidden, output_weight
            )
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        logits = logits / temperature
        scores = TokenScores(*_VocabularyParallel.apply(logits, targets, vocab_size, with_entropy, with_top))
        if not exact:
            return scores
        log_probs = functions.log_softmax(logits.detach()).gather(-1, targets)
        return scores._replace(log_probs=valued(scores.log_probs, log_probs))

    chunk = max(LOGITS_AT_ONCE // len(output_weight), 1)
    if len(targets) <= chunk:
        return rows(hidden, targets)
    parts = [
        checkpoint(rows, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    log_probs, entropies, tops = zip(*parts, strict=True)
    return TokenScores(
        torch.cat(log_probs), torch.cat(entropies) if with_entropy else None, torch.cat(tops) if with_top else None
    )


class _VocabularyParallel(torch.autograd.Function):
    """Log-probs and entropy from logits of which each tensor-parallel rank has a range of the vocabulary.

    With p = softmax: d log p[target] / d logit_v = [v = target] - p_v, and d H / d logit_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, with_entropy: bool, with_top: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        size = logits.shape[-1]
        first = parallel_state.get_tensor_model_parallel_rank() * size
        if first + size > vocab_size:
            logits = logits.clone()
            logits[:, max(vocab_size - first, 0) :] = -torch.inf
        largest_here = logits.amax(-1)
        largest = _reduce(largest_here.clone(), dist.ReduceOp.MAX)
        top = None
        if with_top:  # the lowest token of those that are equally likely
            top = torch.where(largest_here == largest, logits.argmax(-1) + first, vocab_size)
            top = _reduce(top, dist.ReduceOp.MIN)
            ctx.mark_non_differentiable(top)
        shifted = logits - largest.unsqueeze(-1)
        exponentials = shifted.exp()
        total = _reduce(exponentials.sum(-1))
        local = targets - first
        is_here = (local >= 0) & (local < size)
        local = local.clamp(0, size - 1)
        picked = _reduce(torch.where(is_here, shifted.gather(-1, local), 0.0))
        log_total = total.log()
        probs = exponentials / total.unsqueeze(-1)
        entropy = None
        if with_entropy:  # H = log sum exp - sum p * logit; 0 * log 0 counts as 0
            entropy = log_total - _reduce((probs * shifted.clamp(min=torch.finfo(torch.float32).min)).sum(-1))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(probs, local, is_here, shifted if with_entropy else None, log_total, entropy)
        return picked - log_total.unsqueeze(-1), entropy, top

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor, None, None, None, None]:
        probs, local, is_here, shifted, log_total, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(local.shape, device=probs.device)
        grad = probs * -grad_log_probs.sum(-1, keepdim=True)
        grad.scatter_add_(-1, local, torch.where(is_here, grad_log_probs, 0.0))
        if entropy is not None and grad_entropy is not None:
            log_probs = (shifted - log_total.unsqueeze(-1)).clamp(min=torch.finfo(torch.float32).min)
            grad -= probs * (log_probs + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
        return grad, None, None, None, None


def _reduce(value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(value, op=op, group=parallel_state.get_tensor_model_parallel_group())
    return value
