"""Targets of multi-token prediction on packed sequences."""

import torch
from torch import Tensor


def mtp_targets(tokens: Tensor, trainable: Tensor, sequence_ids: Tensor, *, depth: int) -> tuple[Tensor, Tensor]:
    """What the MTP layer at `depth` (1 is the first) predicts at each position, and where that is trained.

    For packed `tokens` int64 [T], `trainable` bool [T] (false on prompts, masked tokens and padding) and `sequence_ids`
    int64 [T] (padding under an id of its own): the target of position t is tokens[t + 1 + depth], trained only if it
    lies in the same sequence and is trainable. Returns targets int64 [T], 0 where not trained, and bool [T].
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
    """
    shift = min(1 + depth, len(tokens))
    trained = torch.zeros_like(trainable)
    trained[: len(tokens) - shift] = trainable[shift:] & (sequence_ids[shift:] == sequence_ids[: len(tokens) - shift])
    return torch.where(trained, tokens.roll(-shift), 0), trained
