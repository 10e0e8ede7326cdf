"""KL estimators against numbers worked out by hand."""

import math

import pytest
import torch

from miles_core.algorithms.kl import kl_divergence, unbiased_kl

LN2 = math.log(2)
TRUE = torch.tensor([True])


@pytest.mark.parametrize(
    ("kl_type", "x", "kl", "slope"),
    [
        ("k1", LN2, LN2, 1.0),
        ("k1", -LN2, -LN2, 1.0),
        ("k2", LN2, LN2**2 / 2, LN2),
        ("k2", -2.0, 2.0, -2.0),
        ("k3", LN2, LN2 - 0.5, 0.5),
        ("k3", -LN2, 1 - LN2, -1.0),
        ("k3", -100.0, math.exp(20) - 101, 1.0),  # only the exponent is bounded
        ("low_var", LN2, LN2 - 0.5, 0.5),
        ("low_var", -3.0, 10.0, 0.0),  # e^3 - 4 = 16.1
        ("low_var", 100.0, 10.0, 0.0),
        ("low_var", 8.0, math.exp(-8) + 7, 1 - math.exp(-8)),
    ],
)
def test_kl_of_a_token(kl_type: str, x: float, kl: float, slope: float) -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    found = kl_divergence(log_probs, torch.tensor([-1.0 - x]), TRUE, kl_type=kl_type)
    assert found.tolist() == pytest.approx([kl], rel=1e-5, abs=1e-6)
    assert torch.autograd.grad(found.sum(), log_probs)[0].tolist() == pytest.approx([slope], rel=1e-5, abs=1e-6)


def test_equal_models_have_no_kl() -> None:
    log_probs = torch.tensor([-1.0])
    for kl_type in ("k1", "k2", "k3", "low_var"):
        assert kl_divergence(log_probs, log_probs, TRUE, kl_type=kl_type) == 0


def test_unbiased_k3_has_the_gradient_of_the_kl() -> None:
    """d(ratio * k3) = ratio * (k3 + 1 - e^-x) = ratio * x, the importance-sampled gradient of the KL."""
    log_probs = torch.tensor([-1.0], requires_grad=True)
    kl = kl_divergence(log_probs, torch.tensor([-1.0 - LN2]), TRUE, kl_type="k3")
    found = unbiased_kl(kl, log_probs, torch.tensor([-1.0 - math.log(3)]), TRUE)
    assert found.tolist() == pytest.approx([3 * (LN2 - 0.5)], rel=1e-5)
    assert torch.autograd.grad(found.sum(), log_probs)[0].tolist() == pytest.approx([3 * LN2], rel=1e-5)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_estimators_average_to_the_kl(kl_type: str) -> None:
    """Over all tokens of a small vocabulary, weighted with the policy's probabilities."""
    policy, reference = (
        torch.log_softmax(torch.randn(7, generator=torch.Generator().manual_seed(s)), -1) for s in (0, 1)
    )
    estimates = kl_divergence(policy, reference, torch.ones(7, dtype=torch.bool), kl_type=kl_type)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    assert (policy.exp() * estimates).sum().item() == pytest.approx(exact.item(), abs=1e-6)
