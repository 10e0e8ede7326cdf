"""Loss of PPO's critic."""

import torch
from torch import Tensor

from miles_core.algorithms.masking import masked
from miles_core.algorithms.policy_loss import ClippedLoss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> ClippedLoss:
    """L = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), without a factor 1/2; [N].

    The convention of OpenAI's PPO (github.com/openai/baselines, ppo2) less its 1/2.
    """
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    unclipped = (values - returns).square()
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ClippedLoss(torch.maximum(unclipped, clipped), clipped > unclipped)
