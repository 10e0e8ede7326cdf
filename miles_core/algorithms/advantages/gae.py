"""Generalized advantage estimation, for PPO."""

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, *, gamma: float, gae_lambda: float) -> np.ndarray:
    """A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t, float64 [T].

    `rewards` and `values` [T] hold trainable tokens only, so that neither the reward nor a value meant for a tool's
    tokens enters. After the last token both V and A are 0. The critic's target is A_t + V_t.
    Source: arXiv 1506.02438, eq. 16.
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values if len(values) else np.zeros(0)
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += gamma * gae_lambda * deltas[t + 1]
    return deltas
