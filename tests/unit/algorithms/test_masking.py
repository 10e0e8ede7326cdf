"""Sums over the trainable tokens of packed sequences."""

import math

import pytest
import torch

from miles_core.algorithms.masking import bounded_exp, masked, sequence_mean, sequence_sum, weighted_sum

VALUES = torch.tensor([1.0, 2.0, 9.0, 5.0, 7.0, 7.0])
MASK = torch.tensor([True, True, False, True, False, False])
IDS = torch.tensor([0, 0, 0, 1, 2, 2])  # three tokens, a single one, a fully masked pair


def test_sequence_sums_and_means_go_back_to_every_token() -> None:
    assert sequence_sum(VALUES, MASK, IDS).tolist() == [3.0, 3.0, 3.0, 5.0, 0.0, 0.0]
    assert sequence_mean(VALUES, MASK, IDS).tolist() == [1.5, 1.5, 1.5, 5.0, 0.0, 0.0]


def test_no_tokens_at_all() -> None:
    nothing = torch.zeros(0)
    mask, ids = nothing.bool(), nothing.long()
    assert sequence_mean(nothing, mask, ids).tolist() == []
    assert weighted_sum(nothing, nothing, mask) == 0


def test_weighted_sum_and_masked() -> None:
    assert weighted_sum(VALUES, torch.full((6,), 0.5), MASK) == 4.0
    assert masked(VALUES, MASK).tolist() == [1.0, 2.0, 0.0, 5.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("log_ratio", "ratio", "slope"),
    [(0.0, 1.0, 1.0), (math.inf, math.exp(20), 0.0), (-math.inf, math.exp(-20), 0.0), (21.0, math.exp(20), 0.0)],
)
def test_bounded_exp(log_ratio: float, ratio: float, slope: float) -> None:
    leaf = torch.tensor(log_ratio, requires_grad=True)
    found = bounded_exp(leaf)
    assert found.item() == pytest.approx(ratio, rel=1e-6)
    assert torch.autograd.grad(found, leaf)[0].item() == slope
