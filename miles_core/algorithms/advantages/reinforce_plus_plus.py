"""REINFORCE++ and its variant with a group baseline. Both are whitened over the whole rollout afterwards."""

import numpy as np

from miles_core.algorithms.advantages.dr_grpo import dr_grpo


def token_rewards(reward: float, kl: np.ndarray, *, kl_coef: float) -> np.ndarray:
    """r_t = -kl_coef * kl_t, plus the reward at the last token; [T], trainable tokens only."""
    rewards = -kl_coef * kl
    if len(rewards):
        rewards[-1] += reward
    return rewards


def reinforce_plus_plus(reward: float, kl: np.ndarray, *, kl_coef: float, gamma: float) -> np.ndarray:
    """A_t = G_t = r_t + gamma * G_{t+1} over the `token_rewards`, float64 [T].

    `kl` [T] holds trainable tokens only: tokens of a tool lie outside the decision process.
    Source: arXiv 2501.03262, section 3.
    """
    returns = token_rewards(reward, kl, kl_coef=kl_coef)
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


def reinforce_plus_plus_baseline(rewards: np.ndarray, kls: list[np.ndarray], *, kl_coef: float) -> list[np.ndarray]:
    """A_{i,t} = r_i - mean(r) - kl_coef * kl_{i,t}, float64 [T_i] for each of the n responses to one prompt.

    Source: arXiv 2501.03262, REINFORCE++-baseline. The whitening that follows replaces the group's std.
    """
    return [centred - kl_coef * kl for centred, kl in zip(dr_grpo(rewards), kls, strict=True)]
