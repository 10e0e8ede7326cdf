"""What the group baselines share."""

import numpy as np


def is_flat(rewards: np.ndarray) -> bool:
    """No two rewards differ (or there are none): nothing to prefer.

    Asked before any arithmetic, because the rounded mean of equal rewards need not equal them, and dividing by a std of
    1e-17 would blow the difference up.
    """
    return len(rewards) == 0 or bool((rewards == rewards[0]).all())
