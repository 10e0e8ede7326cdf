"""Knowledge of a teacher on the student's own samples: KL(student || teacher), the reverse KL."""

import torch
from torch import Tensor


def top_k_reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """sum_v p_student(v) * (log p_student(v) - log p_teacher(v)) over k vocabulary entries of each token, [N].

    Both arguments [N, k] hold full-vocabulary log-probs of the *same* k entries (the teacher's most likely ones),
    logits divided by the rollout temperature. The gradient runs through both factors of the student and never into the
    teacher. What the k entries leave out is not counted, so the value may be negative; it is exact for k = vocabulary.

    Raises:
        ValueError: the shapes differ.
    """
    if student_log_probs.shape != teacher_log_probs.shape:
        raise ValueError(
            f"top-k log-probs of student {tuple(student_log_probs.shape)} and teacher "
            f"{tuple(teacher_log_probs.shape)} must be of one shape: the same tokens and the same k entries"
        )
    rows = mask.unsqueeze(-1)
    student = torch.where(rows, student_log_probs, 0.0)
    teacher = torch.where(rows, teacher_log_probs.detach(), 0.0)
    return (student.exp() * (student - teacher)).sum(-1)
