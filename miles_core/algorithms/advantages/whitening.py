"""Normalisation of advantages over a whole rollout."""

from collections.abc import Sequence

import numpy as np

from miles_core.algorithms.advantages.baseline import is_flat

VARIANCE_EPSILON = 1e-8


def whiten(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) * rsqrt(var + 1e-8), mean and variance over all tokens of all samples, divisor n - 1 (Bessel).

    Takes trainable tokens only, of the *whole* rollout: statistics of a part would depend on how it was cut.
    Equal advantages, and so a single token, become exactly 0.
    """
    tokens = np.concatenate(advantages) if advantages else np.zeros(0)
    if is_flat(tokens):
        return [np.zeros(len(a)) for a in advantages]
    scale = 1 / np.sqrt(tokens.var(ddof=1) + VARIANCE_EPSILON)
    return [(a - tokens.mean()) * scale for a in advantages]
