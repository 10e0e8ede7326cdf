"""REINFORCE leave-one-out."""

import numpy as np

from miles_core.algorithms.advantages.baseline import is_flat


def rloo(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean(r)), float64 [n].

    Equal rewards give exactly 0, and so does a group of one (its others were lost): it has no baseline.
    Source: arXiv 2402.14740, eq. 8.
    """
    n = len(rewards)
    if is_flat(rewards):
        return np.zeros(n)
    return n / (n - 1) * (rewards - rewards.mean())
