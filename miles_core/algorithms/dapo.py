"""What DAPO adds around the loss. Source: arXiv 2503.14476, sections 3.2 and 3.4.

Its clip-higher is `eps_clip_high`, its token-level loss is loss_aggregation=token_mean.
"""

from collections.abc import Sequence

import numpy as np


def overlong_penalty(lengths: np.ndarray, *, max_length: int, buffer: int) -> np.ndarray:
    """Soft overlong punishment, float64 of the shape of `lengths` (tokens), to be added to the reward (eq. 13):

    0 up to max_length - buffer tokens, from there falling linearly to -1 at max_length.
    """
    return np.clip((max_length - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def has_reward_spread(rewards: Sequence[float]) -> bool:
    """Whether a group is worth training on: with equal rewards every advantage is 0. Dynamic sampling drops the others
    and samples further prompts in their place."""
    return len(set(rewards)) > 1
