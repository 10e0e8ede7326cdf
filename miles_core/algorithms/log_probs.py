"""Log-probs and entropies of tokens from logits, on one process with the whole vocabulary."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def scaled_log_probs(logits: Tensor, *, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) over the last dimension, in float32 whatever the logits are.

    Temperature acts before the softmax, as in sampling: dividing log-probs afterwards gives no distribution.
    """
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def token_log_probs(
    logits: Tensor, token_ids: Tensor, *, temperature: float, with_entropy: bool = False, chunk_size: int = 1024
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token, float32 [N], and the entropy of its distribution, float32 [N], if asked for.

    `logits` [N, V] are those that predict `token_ids` int64 [N]: for tokens[t] the model's output at t - 1. Works
    through `chunk_size` rows at a time and recomputes each chunk in the backward pass, so that a float32 softmax of all
    logits is never held.
    """
    log_probs, entropies = [], []
    for rows, ids in zip(logits.split(chunk_size), token_ids.split(chunk_size), strict=True):
        log_prob, entropy = checkpoint(_chunk, rows, ids, temperature, with_entropy, use_reentrant=False)
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def _chunk(logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    distribution = scaled_log_probs(logits, temperature=temperature)
    log_prob = distribution.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return log_prob, None
    possible = ~torch.isneginf(distribution)  # 0 * log 0 counts as 0
    return log_prob, -(distribution.exp() * torch.where(possible, distribution, 0.0)).sum(-1)
