"""Reverse KL to a teacher over its most likely entries."""

import math
from itertools import pairwise

import pytest
import torch

from miles_core.algorithms.distillation import top_k_reverse_kl

STUDENT = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
TEACHER = torch.log(torch.tensor([[0.25, 0.5, 0.25]]))
ONE = torch.tensor([True])


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (3, 0.25 * math.log(2)),
        (2, 0.25 * math.log(2)),  # the rest is a quarter for both
        (1, 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)),
    ],
)
def test_value_by_hand(k: int, expected: float) -> None:
    assert top_k_reverse_kl(STUDENT[:, :k], TEACHER[:, :k], ONE).tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("k", [1, 3, 9, 10])
def test_student_at_the_teacher_is_the_minimum(k: int) -> None:
    """Without the rest of the vocabulary the gradient at the teacher would push its own tokens down."""
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    student = torch.log_softmax(logits, -1)[:, :k]
    teacher = student.detach().clone().requires_grad_()
    loss = top_k_reverse_kl(student, teacher, torch.ones(4, dtype=torch.bool))
    assert loss.abs().max() < 1e-6
    loss.sum().backward()
    assert logits.grad.abs().max() < 1e-6
    assert teacher.grad is None


def test_never_above_the_full_kl_and_growing_with_k() -> None:
    student, teacher = torch.log_softmax(2 * torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(1)), -1)
    mask = torch.ones(5, dtype=torch.bool)
    kls = [top_k_reverse_kl(student[:, :k], teacher[:, :k], mask) for k in range(1, 11)]
    full = torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)
    assert all((low <= high + 1e-6).all() and (low >= -1e-6).all() for low, high in pairwise(kls))
    assert torch.allclose(kls[-1], full, atol=1e-5)


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"student \(3, 2\) and teacher \(4, 2\)"):
        top_k_reverse_kl(torch.zeros(3, 2), torch.zeros(4, 2), torch.ones(3, dtype=torch.bool))
