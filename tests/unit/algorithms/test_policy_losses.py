"""Policy losses against numbers worked out by hand: value and gradient of each token."""

import math

import pytest
import torch
from torch import Tensor

from miles_core.algorithms.cispo import cispo
from miles_core.algorithms.gspo import gspo
from miles_core.algorithms.policy_loss import ClippedLoss, ppo_clip
from miles_core.algorithms.sft import sft_loss
from miles_core.algorithms.value_loss import value_loss

E20 = math.exp(20)

# ratio or log-ratio beyond float, advantage, clip_low, clip_high, dual_clip, loss, dloss/dlog_prob, clipped
PPO_CASES = {
    "on policy": (1.0, 2.0, 0.2, 0.2, None, -2.0, -2.0, False),
    "above, wanted": (1.5, 1.0, 0.2, 0.2, None, -1.2, 0.0, True),
    "above, unwanted": (1.5, -1.0, 0.2, 0.2, None, 1.5, 1.5, False),
    "below, wanted": (0.5, 1.0, 0.2, 0.2, None, -0.5, -0.5, False),
    "below, unwanted": (0.5, -1.0, 0.2, 0.2, None, 0.8, 0.0, True),
    "clip-higher leaves 1.25": (1.25, 1.0, 0.2, 0.28, None, -1.25, -1.25, False),
    "clip-higher keeps the lower bound": (0.75, -1.0, 0.2, 0.28, None, 0.8, 0.0, True),
    "no advantage": (1.5, 0.0, 0.2, 0.2, None, 0.0, 0.0, False),
    "dual clip off": (5.0, -1.0, 0.2, 0.2, None, 5.0, 5.0, False),
    "dual clip": (5.0, -1.0, 0.2, 0.2, 3.0, 3.0, 0.0, False),
    "dual clip, positive advantage": (5.0, 1.0, 0.2, 0.2, 3.0, -1.2, 0.0, True),
    "dual clip, below it": (2.0, -1.0, 0.2, 0.2, 3.0, 2.0, 2.0, False),
    "e^100 up": (math.exp(100), 1.0, 0.2, 0.2, None, -1.2, 0.0, True),
    "e^100 down": (math.exp(100), -1.0, 0.2, 0.2, None, E20, 0.0, False),
    "e^-100 up": (math.exp(-100), 1.0, 0.2, 0.2, None, -1 / E20, 0.0, False),
    "e^-100 down": (math.exp(-100), -1.0, 0.2, 0.2, None, 0.8, 0.0, True),
}


def gradient(loss: Tensor, parameter: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), parameter)[0].tolist()


@pytest.mark.parametrize("case", PPO_CASES.values(), ids=PPO_CASES.keys())
def test_ppo_clip(case: tuple) -> None:
    ratio, advantage, low, high, dual, loss, slope, clipped = case
    log_probs = torch.tensor([-0.7], requires_grad=True)
    old = torch.tensor([-0.7 - math.log(ratio)])
    found = ppo_clip(
        log_probs, old, torch.tensor([advantage]), torch.tensor([True]), clip_low=low, clip_high=high, dual_clip=dual
    )
    assert found.loss.tolist() == pytest.approx([loss], rel=1e-6)
    assert gradient(found.loss, log_probs) == pytest.approx([slope], rel=1e-6)
    assert found.clipped.tolist() == [clipped]


# log-ratios, mask and ids of two packed sequences -> sequence ratios 1.5 (third token masked) and 2
GSPO_LOG_RATIOS = [math.log(1.5), math.log(1.5), 9.0, math.log(4), 0.0]
GSPO_MASK = torch.tensor([True, True, False, True, True])
GSPO_IDS = torch.tensor([0, 0, 0, 1, 1])


def run_gspo(log_probs: Tensor, advantages: list[float]) -> ClippedLoss:
    old = log_probs.detach() - torch.tensor(GSPO_LOG_RATIOS)
    return gspo(log_probs, old, torch.tensor(advantages), GSPO_MASK, GSPO_IDS, clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize(
    ("advantages", "loss", "slope", "clipped"),
    [
        ([-1.0, -1.0, 7.0, 1.0, 1.0], [1.5, 1.5, 0.0, -1.2, -1.2], [1.5, 1.5, 0.0, 0.0, 0.0], [0, 0, 0, 1, 1]),
        ([1.0, 1.0, 7.0, -1.0, -1.0], [-1.2, -1.2, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 2.0, 2.0], [1, 1, 0, 0, 0]),
    ],
)
def test_gspo_clips_whole_sequences(
    advantages: list[float], loss: list[float], slope: list[float], clipped: list[int]
) -> None:
    log_probs = torch.full((5,), -0.7, requires_grad=True)
    found = run_gspo(log_probs, advantages)
    assert found.loss.tolist() == pytest.approx(loss, rel=1e-5)
    assert gradient(found.loss, log_probs) == pytest.approx(slope, rel=1e-5)
    assert found.clipped.int().tolist() == clipped


def test_gspo_gradient_is_that_of_the_sequence_loss() -> None:
    """The mean over a sequence's tokens against -A * exp(mean log-ratio) differentiated as it stands."""
    log_probs = torch.full((5,), -0.7, requires_grad=True)
    advantages = torch.tensor([-0.4, -0.4, 0.0, -0.9, -0.9])
    weights = torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5])
    found = run_gspo(log_probs, advantages.tolist()).loss * weights
    log_ratio = log_probs - log_probs.detach() + torch.tensor(GSPO_LOG_RATIOS)
    direct = 0.4 * log_ratio[:2].mean().exp() + 0.9 * log_ratio[3:].mean().exp()
    assert found.sum().item() == pytest.approx(direct.item())
    assert gradient(found, log_probs) == pytest.approx(gradient(direct, log_probs))


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "weight"),
    [
        (1.0, 2.0, 0.2, 0.2, 1.0),
        (1.5, 2.0, 0.2, 0.2, 1.2),  # clipped, but the gradient stays
        (1.5, -2.0, 0.2, 0.2, 1.2),
        (0.5, 1.0, 1.0, 4.0, 0.5),
        (0.5, 1.0, 0.2, 4.0, 0.8),
        (math.exp(100), 1.0, 1.0, 4.0, 5.0),
    ],
)
def test_cispo_weights_every_token_and_keeps_its_gradient(
    ratio: float, advantage: float, low: float, high: float, weight: float
) -> None:
    log_probs = torch.tensor([-0.7], requires_grad=True)
    old = torch.tensor([-0.7 - math.log(ratio)])
    found = cispo(log_probs, old, torch.tensor([advantage]), torch.tensor([True]), clip_low=low, clip_high=high)
    assert found.loss.tolist() == pytest.approx([0.7 * weight * advantage], rel=1e-6)
    assert gradient(found.loss, log_probs) == pytest.approx([-weight * advantage], rel=1e-6)
    assert found.clipped.tolist() == [weight != pytest.approx(ratio)]


def test_sft_is_the_cross_entropy_of_trainable_tokens() -> None:
    log_probs = torch.tensor([-0.5, -2.0, -3.0], requires_grad=True)
    loss = sft_loss(log_probs, torch.tensor([True, False, True]))
    assert loss.tolist() == [0.5, 0.0, 3.0]
    assert gradient(loss, log_probs) == [-1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (1.0, 0.9, 0.0, 1.0, 2.0, False),  # inside the clip
        (1.0, 0.5, 0.0, 1.0, 2.0, False),  # (0.7)^2 is the smaller
        (1.0, 0.5, 1.5, 0.64, 0.0, True),  # (0.7 - 1.5)^2 is the larger
        (-1.0, 0.5, -2.0, 5.29, 0.0, True),  # (0.3 + 2)^2
    ],
)
def test_value_loss_takes_the_larger_of_clipped_and_unclipped(
    value: float, old: float, target: float, loss: float, slope: float, clipped: bool
) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.tensor([old]), torch.tensor([target]), torch.tensor([True]), clip=0.2)
    assert found.loss.tolist() == pytest.approx([loss])
    assert gradient(found.loss, values) == pytest.approx([slope])
    assert found.clipped.tolist() == [clipped]
