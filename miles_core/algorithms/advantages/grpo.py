"""GRPO and, with the same advantage, GSPO."""

import numpy as np

from miles_core.algorithms.advantages.baseline import is_flat

STD_EPSILON = 1e-6


def grpo(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the responses to one prompt, float64 [n].

    std is the unbiased one (divisor n - 1). Equal rewards, and so a group of one, give exactly 0.
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    if is_flat(rewards):
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPSILON)
