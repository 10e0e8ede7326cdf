"""Log-probs and entropies of tokens."""

import math

import pytest
import torch

from miles_core.algorithms.log_probs import scaled_log_probs, token_log_probs


def test_temperature_divides_logits_before_the_softmax() -> None:
    """Without it the log-prob is ln 2/3 = -0.405; dividing that by the temperature gives -0.811."""
    found, entropy = token_log_probs(torch.tensor([[0.0, math.log(2)]]), torch.tensor([1]), temperature=0.5)
    assert found.tolist() == pytest.approx([math.log(0.8)])
    assert entropy is None


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_equal_the_whole_in_value_and_gradient(chunk_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, 101, generator=generator)).to(dtype).requires_grad_()
    ids = torch.randint(101, (7,), generator=generator)
    log_probs, entropy = token_log_probs(logits, ids, temperature=0.7, with_entropy=True, chunk_size=chunk_size)
    assert log_probs.dtype == entropy.dtype == torch.float32
    distribution = torch.distributions.Categorical(logits=logits.float() / 0.7)
    assert torch.allclose(log_probs, distribution.log_prob(ids), atol=1e-6)
    assert torch.allclose(entropy, distribution.entropy(), atol=1e-6)
    weights = torch.randn(2, 7, generator=generator)
    (found,) = torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), logits)
    direct = (weights[0] * distribution.log_prob(ids) + weights[1] * distribution.entropy()).sum()
    assert torch.allclose(found, torch.autograd.grad(direct, logits)[0], atol=1e-6)


def test_impossible_entries_do_not_spoil_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([0]), temperature=1.0, with_entropy=True)
    assert entropy.tolist() == pytest.approx([math.log(2)])
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    assert gradient.tolist() == [pytest.approx([0.5, -0.5, 0.0])]


def test_backward_keeps_no_softmax_of_all_logits() -> None:
    """Only the logits themselves are saved; each chunk's softmax is made again."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits = torch.randn(64, 50, requires_grad=True)
        token_log_probs(logits, torch.zeros(64, dtype=torch.int64), temperature=0.5, chunk_size=8)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    storages.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(storages.values()) < logits.untyped_storage().nbytes() / 2


def test_ids_and_logits_must_be_of_one_length() -> None:
    with pytest.raises(ValueError):
        token_log_probs(torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64), temperature=1.0, chunk_size=2)


def test_scaled_log_probs_are_float32_and_sum_to_one() -> None:
    found = scaled_log_probs(torch.randn(3, 11, dtype=torch.bfloat16), temperature=2.0)
    assert found.dtype == torch.float32
    assert torch.allclose(found.exp().sum(-1), torch.ones(3))
