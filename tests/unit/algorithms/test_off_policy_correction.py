"""Importance weights between rollout and trainer, by hand."""

import math

import pytest
import torch

from miles_core.algorithms.mismatch import effective_sample_ratio, logprob_abs_diff, mismatch_kl
from miles_core.algorithms.off_policy import importance_ratio, off_policy_correction
from miles_core.algorithms.opsm import off_policy_sequence_mask
from miles_core.config.algorithm import OffPolicyConfig

# Two sequences: ratios 2, 1/2 and a masked 8 (product 1), then 3, 3 (product 9, geometric mean 3).
RATIOS = [2.0, 0.5, 8.0, 3.0, 3.0]
MASK = torch.tensor([True, True, False, True, True])
IDS = torch.tensor([0, 0, 0, 1, 1])
ROLLOUT = torch.tensor([-1.0, -2.0, -1.5, -0.5, -3.0])
OLD = ROLLOUT + torch.tensor(RATIOS).log()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 0.5, 1.0, 3.0, 3.0]),
        ("sequence", [1.0, 1.0, 1.0, 9.0, 9.0]),
        ("geometric", [1.0, 1.0, 1.0, 3.0, 3.0]),
    ],
)
def test_ratio_of_each_level(level: str, expected: list[float]) -> None:
    assert importance_ratio(OLD, ROLLOUT, MASK, IDS, level=level).tolist() == pytest.approx(expected, rel=1e-6)


# options -> weights, rejected
CORRECTIONS = {
    "tis": ({"method": "tis"}, [2.0, 0.5, 0, 2.0, 2.0], []),
    "tis clip": ({"method": "tis", "mode": "clip", "lower": 0.6}, [2.0, 0.6, 0, 2.0, 2.0], []),
    "tis mask": ({"method": "tis", "mode": "mask", "lower": 0.6, "upper": 2.5}, [2.0, 0, 0, 0, 0], [1, 3, 4]),
    "tis sequence": ({"method": "tis", "level": "sequence", "upper": 4.0}, [1, 1, 0, 4.0, 4.0], []),
    "tis geometric": ({"method": "tis", "level": "geometric", "upper": 4.0}, [1, 1, 0, 3.0, 3.0], []),
    "icepop": ({"method": "icepop", "upper": 2.5}, [2.0, 0.5, 0, 0, 0], [3, 4]),
    "mis": ({"method": "mis", "lower": 0.6, "upper": 2.5}, [2.0, 0, 0, 0, 0], [1, 3, 4]),
    "mis, other bounds": (
        {"method": "mis", "rejection_lower": 0.4, "rejection_upper": 4.0},
        [2.0, 0.5, 0, 2.0, 2.0],
        [],
    ),
    "mis, sequences": ({"method": "mis", "rejection_level": "sequence"}, [2.0, 0.5, 0, 0, 0], [3, 4]),
    "mis, means": ({"method": "mis", "rejection_level": "geometric", "rejection_upper": 3.5}, [2.0, 0.5, 0, 2, 2], []),
    "veto": ({"method": "tis", "veto_threshold": 0.6}, [0, 0, 0, 2.0, 2.0], [0, 1]),
    "veto spares": ({"method": "tis", "veto_threshold": 0.4}, [2.0, 0.5, 0, 2.0, 2.0], []),
    "none": ({}, [1.0, 1.0, 1.0, 1.0, 1.0], []),
}


@pytest.mark.parametrize(("options", "weights", "rejected"), CORRECTIONS.values(), ids=CORRECTIONS.keys())
def test_weights_and_rejections(options: dict, weights: list[float], rejected: list[int]) -> None:
    found = off_policy_correction(OLD, ROLLOUT, MASK, IDS, config=OffPolicyConfig(**options))
    assert found.weights.tolist() == pytest.approx(weights, rel=1e-6)
    assert found.rejected.nonzero().flatten().tolist() == rejected


def test_clipped_marks_where_a_bound_changed_the_weight() -> None:
    config = OffPolicyConfig(method="tis", mode="clip", lower=0.6, upper=2.5)
    found = off_policy_correction(OLD, ROLLOUT, MASK, IDS, config=config)
    assert found.clipped.tolist() == [False, True, False, True, True]


def test_correction_carries_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not off_policy_correction(
        old, ROLLOUT, MASK, IDS, config=OffPolicyConfig(method="tis")
    ).weights.requires_grad


@pytest.mark.parametrize(
    ("delta", "dropped"),
    [
        (0.15, [False, True, False, False, False]),  # only the negative advantage of the drifted sequence 0
        (0.25, [False] * 5),
    ],
)
def test_opsm_drops_negative_tokens_of_drifted_sequences(delta: float, dropped: list[bool]) -> None:
    """Mean old - new: sequence 0 (0.3 + 0.1) / 2 = 0.2 without its masked token, sequence 1 (-0.5 + 0.5) / 2 = 0."""
    new = torch.zeros(5)
    old = torch.tensor([0.3, 0.1, 99.0, -0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0])
    assert off_policy_sequence_mask(new, old, advantages, MASK, IDS, delta=delta).tolist() == dropped


def test_mismatch_of_each_token() -> None:
    """k3 of KL(rollout || old) with x = -ln ratio is ratio - 1 - ln ratio."""
    expected = [r - 1 - math.log(r) if m else 0 for r, m in zip(RATIOS, MASK, strict=True)]
    assert mismatch_kl(OLD, ROLLOUT, MASK).tolist() == pytest.approx(expected, rel=1e-5)
    expected = [abs(math.log(r)) if m else 0 for r, m in zip(RATIOS, MASK, strict=True)]
    assert logprob_abs_diff(OLD, ROLLOUT, MASK).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "expected"), [([1.0, 1.0, 1.0], 1.0), ([2.0, 0.5], 6.25 / 8.5), ([1.0, 0.0], 0.5), ([0.0], 0.0)]
)
def test_effective_sample_ratio(weights: list[float], expected: float) -> None:
    squares = sum(w * w for w in weights)
    assert effective_sample_ratio(sum(weights), squares, len(weights)) == pytest.approx(expected)
