"""Sampling: distributions, filters, log-probs, seeds."""

import math

import numpy as np
import pytest
import torch

from miles_core.rollout.embedded.sampler import sample, scaled_log_softmax, uniform

PROBS = np.array([0.30, 0.05, 0.25, 0.10, 0.20, 0.10])
DRAWS = 20_000


def draw(logits: torch.Tensor, rows: int, temperature: float, top_k: int = -1, top_p: float = 1.0, seed: int = 0):
    return sample(
        logits.expand(rows, -1),
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_k),
        np.full(rows, top_p, dtype=np.float32),
        uniform(np.arange(seed, seed + rows, dtype=np.uint64), np.zeros(rows, dtype=np.uint64)),
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, -1, 1.0, [0, 1, 2, 3, 4, 5]),
        (2.0, -1, 1.0, [0, 1, 2, 3, 4, 5]),
        (1.0, 3, 1.0, [0, 2, 4]),
        (1.0, 4, 1.0, [0, 2, 3, 4]),  # of equals the lower id
        (1.0, -1, 0.74, [0, 2, 4]),
        (1.0, -1, 0.76, [0, 2, 3, 4]),
        (1.0, -1, 0.29, [0]),
        (1.0, 2, 0.60, [0, 2]),  # both filters see the whole distribution
        (1.0, 4, 0.50, [0, 2]),
        (0.5, -1, 0.50, [0, 2]),  # the temperature comes first
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, kept: list[int]) -> None:
    tokens, _ = draw(torch.tensor(PROBS).log().float(), DRAWS, temperature, top_k, top_p)
    expected = np.zeros(len(PROBS))
    expected[kept] = PROBS[kept] ** (1 / temperature)
    expected *= DRAWS / expected.sum()
    counts = np.bincount(tokens.numpy(), minlength=len(PROBS))
    assert (counts[expected == 0] == 0).all()
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < [0, 10.8, 13.8, 16.3, 18.5, 20.5][max(len(kept) - 1, 1)]  # 0.1% level, by degrees of freedom


def test_log_probs_are_of_the_unfiltered_distribution_at_the_temperature() -> None:
    """Logits [0, ln 2] at temperature 0.5 are [0, 2 ln 2] = log [1, 4] after division: token 1 has 4/5."""
    logits = torch.tensor([0.0, math.log(2)])
    assert scaled_log_softmax(logits, 0.5)[1].item() == pytest.approx(math.log(0.8), abs=1e-6)
    tokens, log_probs = draw(logits, 50, temperature=0.5, top_k=1)
    assert tokens.tolist() == [1] * 50
    np.testing.assert_allclose(log_probs, math.log(0.8), atol=1e-6)


def test_temperature_0_takes_the_most_likely_token_with_its_log_prob_at_temperature_1() -> None:
    logits = torch.tensor(PROBS).log().float() + 7.0
    tokens, log_probs = draw(logits, 20, temperature=0.0, top_p=0.1)
    assert tokens.tolist() == [0] * 20
    np.testing.assert_allclose(log_probs, math.log(0.3), atol=1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Rows with different temperatures and filters together give what each gives alone."""
    generator = np.random.default_rng(0)
    rows, vocab = 64, 300
    logits = torch.from_numpy(generator.normal(size=(rows, vocab)).astype(np.float32) * 2)
    temperature = generator.choice(np.array([0.0, 0.5, 1.0, 1.7], dtype=np.float32), rows)
    top_k, top_p = generator.choice([-1, 1, 20], rows), generator.choice(np.array([0.3, 0.9, 1.0], np.float32), rows)
    uniforms = uniform(np.arange(rows, dtype=np.uint64), np.full(rows, 5, dtype=np.uint64))
    together, log_probs = sample(logits, temperature, top_k, top_p, uniforms)
    for i in range(rows):
        row = slice(i, i + 1)
        alone, log_prob = sample(logits[row], temperature[row], top_k[row], top_p[row], uniforms[row])
        assert (alone.item(), log_prob.item()) == (together[i].item(), log_probs[i].item())


@pytest.mark.parametrize("uniforms", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_give_possible_tokens(uniforms: float) -> None:
    logits = torch.full((1, 1000), -1000.0)  # probability exactly 0
    logits[0, 300:303] = torch.tensor([1.0, 2.0, 3.0])
    one = np.ones(1, dtype=np.float32)
    tokens, log_probs = sample(logits, one, np.array([-1]), one, np.array([uniforms]))
    assert tokens.item() == (300 if uniforms == 0 else 302)
    assert np.isfinite(log_probs.item())


def test_uniforms_are_uniform_over_seeds_and_over_steps() -> None:
    n = 1 << 16
    numbers, fixed = np.arange(n, dtype=np.uint64), np.full(n, 12345, dtype=np.uint64)
    for drawn in (uniform(numbers, fixed), uniform(fixed, numbers)):
        assert ((drawn >= 0) & (drawn < 1)).all()
        assert len(np.unique(drawn)) == n
        counts = np.histogram(drawn, bins=256, range=(0, 1))[0]
        assert abs(((counts - 256) ** 2 / 256).sum() - 255) < 5 * math.sqrt(2 * 255)
        lagged = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
        assert abs(lagged) < 5 / math.sqrt(n)


def test_uniform_is_splitmix64() -> None:
    """First outputs of the published generator for the state that seed 0 is mixed to, which is 0."""
    bits = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    drawn = uniform(np.zeros(3, dtype=np.uint64), np.arange(3, dtype=np.uint64))
    np.testing.assert_array_equal(drawn, [(b >> 11) / 2**53 for b in bits])
