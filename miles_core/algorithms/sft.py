"""Supervised fine-tuning."""

from torch import Tensor

from miles_core.algorithms.masking import masked


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """L = -log_probs: cross-entropy of each trainable token, [N]."""
    return -masked(log_probs, mask)
