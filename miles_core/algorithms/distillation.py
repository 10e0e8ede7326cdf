"""Learning from a teacher on the student's own samples: KL(student || teacher), the reverse KL.

This is the form that is a loss, over several vocabulary entries of each token. The form on the sampled tokens alone is
an advantage: advantages/distillation.py.
"""

import torch
from torch import Tensor

LOG_MASS_MAX = -1e-7  # keeps log(1 - mass) and its gradient finite where k entries hold all the mass


def top_k_reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """sum_v p_student(v) * (log p_student(v) - log p_teacher(v)) over k vocabulary entries and the rest as one, [N].

    Both arguments [N, k] hold full-vocabulary log-probs of the *same* k entries (the teacher's most likely ones),
    logits divided by the rollout temperature. The rest of the vocabulary counts as one more entry: without it the
    minimum would lie at p_student = p_teacher / e, not at the teacher. A lower bound of the full KL, never negative,
    exact for k = vocabulary. The gradient never runs into the teacher.
    Source: the log-sum inequality; the tail entry as in arXiv 2601.20802 (SDPO).

    Raises:
        ValueError: the shapes differ.
    """
    if student_log_probs.shape != teacher_log_probs.shape:
        raise ValueError(
            f"top-k log-probs of student {tuple(student_log_probs.shape)} and teacher "
            f"{tuple(teacher_log_probs.shape)} must be of one shape: the same tokens and the same k entries"
        )
    student = _with_rest(student_log_probs, mask)
    teacher = _with_rest(teacher_log_probs.detach(), mask)
    return (student.exp() * (student - teacher)).sum(-1)


def _with_rest(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[N, k + 1]: the last entry is the log of the remaining mass."""
    log_probs = torch.where(mask.unsqueeze(-1), log_probs, 0.0)
    log_mass = torch.logsumexp(log_probs, dim=-1, keepdim=True).clamp(max=LOG_MASS_MAX)
    return torch.cat([log_probs, torch.log(-torch.expm1(log_mass))], dim=-1)
