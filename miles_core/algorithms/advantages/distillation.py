"""On-policy distillation as an advantage."""

import numpy as np


def distillation_advantage(student_log_probs: np.ndarray, teacher_log_probs: np.ndarray, *, coef: float) -> np.ndarray:
    """A_t = -coef * (student_t - teacher_t), float64 [T], of the tokens that the student sampled.

    The policy gradient with this constant advantage descends the reverse KL(student || teacher): a token that the
    teacher likes better than the student rises. Both log-probs are of logits / rollout temperature.
    Source: K. Lu, "On-policy distillation", Thinking Machines Lab, 2025.
    """
    return -coef * (student_log_probs - teacher_log_probs)
