"""Log-probs and entropies from hidden states, against torch's log_softmax: values, gradients, memory, sharding."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from trainer_models import run_config

from miles_core.trainer.megatron import log_probs
from miles_core.trainer.megatron.log_probs import token_log_probs
from miles_core.trainer.megatron.trainer import MegatronTrainer

_NAME = "llama-tied"
_N, _HIDDEN, _VOCABULARY, _TEMPERATURE = 21, 8, 13, 0.7


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_N, _HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(_VOCABULARY, _HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(_VOCABULARY, (_N, 2), generator=generator)
    return hidden, weight, targets


def _loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Depends on every entry in a way of its own."""
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    return (weights * log_probs).sum() + (torch.linspace(1, 2, len(entropy)) * entropy).sum()


def _expected(softcap: float | None) -> list[Tensor]:
    """Log-probs, entropy, the likeliest tokens, and the gradients of hidden and weight."""
    hidden, weight, targets = _inputs()
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.log_softmax(logits / _TEMPERATURE, -1)
    found = distribution.gather(-1, targets), -(distribution.exp() * distribution).sum(-1)
    _loss(*found).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [*(x.detach() for x in found), logits.argmax(-1), hidden.grad, weight.grad]


def _found(weight_rows: slice, softcap: float | None = None) -> list[Tensor]:
    hidden, weight, targets = _inputs()
    padded = torch.cat([weight, torch.full((1, _HIDDEN), 100.0)])  # a row of padding that would win everywhere
    values, entropy, top = token_log_probs(
        hidden,
        padded[weight_rows],
        targets,
        temperature=_TEMPERATURE,
        vocab_size=_VOCABULARY,
        logit_softcap=softcap,
        with_entropy=True,
        with_top=True,
    )
    assert entropy is not None and top is not None
    _loss(values, entropy).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [values.detach(), entropy.detach(), top, hidden.grad, weight.grad]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [None, 4])
def test_values_and_gradients_equal_torch(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None, softcap: float | None
) -> None:
    if chunk is not None:
        monkeypatch.setattr(log_probs, "LOGITS_AT_ONCE", chunk * (_VOCABULARY + 1))
    with trainer_of(_NAME, run_config(_NAME, samples=1)):
        found = _found(slice(None), softcap)
    for ours, theirs in zip(found, _expected(softcap), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_chunks_keep_no_logits_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = _inputs()
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape[-1] if tensor.dim() == 2 else 0)
        return tensor

    monkeypatch.setattr(log_probs, "LOGITS_AT_ONCE", 4 * _VOCABULARY)
    with trainer_of(_NAME, run_config(_NAME, samples=1)), saved_tensors_hooks(note, lambda tensor: tensor):
        token_log_probs(hidden, weight, targets, temperature=1.0, vocab_size=_VOCABULARY)
    assert _VOCABULARY not in saved


def _of_this_rank(trainer: MegatronTrainer) -> list[np.ndarray]:
    """Each rank has half of the 14 rows; the last row of rank 1 is padding."""
    rank = trainer._batches._place.tensor_rank
    return [tensor.numpy() for tensor in _found(slice(7 * rank, 7 * rank + 7))]


@pytest.mark.slow
def test_tensor_parallel_ranks_together_equal_torch() -> None:
    config: Any = run_config(_NAME, samples=1, trainer={"num_ranks": 2, "parallel": {"tensor": 2}})
    first, second = ([torch.from_numpy(a) for a in arrays] for arrays in on_ranks(_NAME, config, _of_this_rank))
    values, entropy, top, hidden_grad, weight_grad = _expected(None)
    for rank in (first, second):
        torch.testing.assert_close(rank[0], values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rank[1], entropy, atol=1e-5, rtol=1e-5)
        assert rank[2].equal(top)
    torch.testing.assert_close(first[3] + second[3], hidden_grad, atol=1e-5, rtol=1e-5)  # PolicyModel adds them up
    torch.testing.assert_close(first[4] + second[4], weight_grad, atol=1e-5, rtol=1e-5)
