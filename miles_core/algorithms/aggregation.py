"""The only place that divides a loss.

Every token's share in the loss of the *global* batch is fixed here, before the batch is cut. A micro-batch, rank or
context shard then just sums `weight * loss` over its own tokens, and the sums add up: the split cannot change loss or
gradient.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Aggregation = Literal["sample_mean", "token_mean", "constant"]


def loss_weights(loss_masks: Sequence[np.ndarray], mode: Aggregation, constant_length: int) -> list[np.ndarray]:
    """Weight of each response token, float32 [R] for each mask [R] of the N samples of one optimizer step.

    - sample_mean: 1 / (mask_sum_i * N), the mean over samples of means over tokens (GRPO, arXiv 2402.03300). N counts
      every sample; one without trainable tokens weighs 0, so the weights then sum to less than 1.
    - token_mean: 1 / (sum of all masks) (DAPO, arXiv 2503.14476).
    - constant: 1 / (N * constant_length), no length in the divisor (Dr. GRPO, arXiv 2503.20783); N as above.

    Raises:
        ValueError: no sample, or no trainable token in the whole batch: there is nothing to train on.
    """
    lengths = [int(np.count_nonzero(mask)) for mask in loss_masks]
    n, tokens = len(lengths), sum(lengths)
    if not tokens:
        raise ValueError(f"nothing to train on: {n} samples with no trainable token in their loss masks")
    if mode == "sample_mean":
        shares = [1 / (length * n) if length else 0.0 for length in lengths]
    elif mode == "token_mean":
        shares = [1 / tokens] * n
    else:
        shares = [1 / (n * constant_length)] * n
    return [
        np.where(np.asarray(mask) != 0, share, 0).astype(np.float32)
        for mask, share in zip(loss_masks, shares, strict=True)
    ]
