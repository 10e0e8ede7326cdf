"""The critic's loss and its metrics."""

from dataclasses import fields

import pytest
import torch

from miles_core.algorithms.value_objective import ValueInputs, finalize_value_metrics, value_objective
from miles_core.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(advantage_estimator="ppo")
MASK = torch.tensor([True, True, False, True])


def batch(values: list[float], returns: list[float]) -> ValueInputs:
    predicted = torch.tensor(values, requires_grad=True)
    return ValueInputs(predicted, predicted.detach(), torch.tensor(returns), MASK, MASK.float() / 3)


def report(*parts: ValueInputs) -> dict[str, float]:
    metrics = [value_objective(part, CONFIG)[1] for part in parts]
    return finalize_value_metrics({name: sum(float(m[name]) for m in metrics) for name in metrics[0]})


def test_loss_is_the_weighted_squared_error() -> None:
    inputs = batch([1.0, 2.0, 99.0, 0.0], [0.0, 2.0, -99.0, 3.0])
    loss, metrics = value_objective(inputs, CONFIG)
    assert loss.item() == pytest.approx(10 / 3)
    loss.backward()
    assert inputs.values.grad.tolist() == pytest.approx([2 / 3, 0.0, 0.0, -2.0])
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 9.0, 3.0], 1.0),
        ([2.0, 2.0, 9.0, 2.0], 0.0),  # a constant explains nothing
        ([0.0, 1.0, 9.0, 2.0], 1.0),  # an offset is no variance
        ([3.0, 2.0, 9.0, 1.0], -3.0),  # errors -2, 0, 2: four times the variance of the returns
    ],
)
def test_explained_variance(values: list[float], expected: float) -> None:
    returns = [1.0, 2.0, -9.0, 3.0]
    assert report(batch(values, returns))["explained_variance"] == pytest.approx(expected, abs=1e-5)
    whole = batch(values, returns)
    halves = [
        ValueInputs(**{f.name: getattr(whole, f.name)[rows] for f in fields(whole)}) for rows in (slice(2), slice(2, 4))
    ]
    assert report(*halves) == pytest.approx(report(whole), abs=1e-6)


def test_equal_returns_have_no_variance_to_explain() -> None:
    assert report(batch([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 7.0, 1.0]))["explained_variance"] == 0.0
