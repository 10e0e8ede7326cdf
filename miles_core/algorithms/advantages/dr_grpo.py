"""Dr. GRPO."""

import numpy as np

from miles_core.algorithms.advantages.baseline import is_flat


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r) over the responses to one prompt, float64 [n]: no std, which favours too easy and too hard
    prompts. Equal rewards, and so a group of one, give exactly 0.

    Source: arXiv 2503.20783, section 3. Its other half, a constant divisor, is loss_aggregation=constant.
    """
    if is_flat(rewards):
        return np.zeros(len(rewards))
    return rewards - rewards.mean()
