"""Exact functions: the same bits for a token alone, among others and padded; the values of torch's own functions."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conversion.geometry import MoeGeometry
from miles_core.exact import functions as exact
from miles_core.exact.gradient import with_gradient_of

torch.manual_seed(0)
X = torch.randn(90, 48) * 3
WEIGHT, BIAS, GAIN = torch.randn(101, 48), torch.randn(101), torch.randn(48)
TOKENWISE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (
        lambda x: exact.linear(x, exact.weight_rows(WEIGHT), BIAS),
        lambda x: F.linear(x, WEIGHT, BIAS),
    ),
    "rms_norm": (
        lambda x: exact.rms_norm(x, GAIN, 1e-5, plus_one=False),
        lambda x: F.rms_norm(x, (48,), GAIN, 1e-5),
    ),
    "rms_norm_plus_one": (
        lambda x: exact.rms_norm(x, GAIN, 1e-5, plus_one=True),
        lambda x: F.rms_norm(x, (48,), 1 + GAIN, 1e-5),
    ),
    "silu": (exact.silu, F.silu),
    "gelu": (exact.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    "log_softmax": (exact.log_softmax, lambda x: torch.log_softmax(x, -1)),
}


@pytest.mark.parametrize("name", TOKENWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    function, plain = TOKENWISE[name]
    x = X if name == "log_softmax" else X.to(dtype)
    together = function(x)
    for rows in (1, 2, 5, 31, 89):
        for start in (0, 1, 90 - rows):
            assert function(x[start : start + rows]).equal(together[start : start + rows])
    tolerance = 1e-5 if x.dtype == torch.float32 else 0.02
    expected = plain(x.float())
    torch.testing.assert_close(together.float(), expected, atol=tolerance * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_of_the_last_token_is_that_of_decoding(softcap: float | None) -> None:
    """Prompt pass and decoding: more queries, fewer keys, other padding, the same bits."""
    torch.manual_seed(1)
    heads, length, width = 3, 40, 16
    q, k, v = (torch.randn(heads, length, width) for _ in range(3))
    v *= torch.logspace(-6, 3, length).unsqueeze(-1)  # values of very different size
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    whole = exact.attention(q, k, v, causal, 0.25, softcap, max_length=64)
    scores = q.double() @ k.double().mT * 0.25
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    expected = scores.masked_fill(~causal, -math.inf).softmax(-1) @ v.double()
    assert ((whole - expected).abs() / expected.abs().amax(-1, keepdim=True)).max() < 1e-5
    for token in (0, 1, 17, 39):
        columns = token + 1
        seen = torch.ones(1, columns, dtype=torch.bool)
        alone = exact.attention(q[:, token:columns], k[:, :columns], v[:, :columns], seen, 0.25, softcap, 64)
        assert alone[:, 0].equal(whole[:, token])
        padded = [torch.cat([x[:, :columns], torch.full((heads, 9, width), 1e3)], 1) for x in (k, v)]
        hidden = torch.cat([seen, torch.zeros(1, 9, dtype=torch.bool)], 1)
        alone = exact.attention(q[:, token:columns], padded[0], padded[1], hidden, 0.25, softcap, 64)
        assert alone[:, 0].equal(whole[:, token])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_gate_weights(score: str, norm_topk: bool) -> None:
    moe = MoeGeometry(
        8, top_k=3, ffn_hidden_size=8, is_moe_layer=(True,), score=score, router_bias=False, norm_topk=norm_topk,
        routed_scaling=1.5,
    )  # fmt: skip
    logits = torch.randn(50, 8)
    experts = logits.topk(3).indices
    chosen = torch.zeros(50, 8, dtype=torch.bool).scatter_(1, experts, True)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    expected = scores.masked_fill(~chosen, 0.0)
    if norm_topk:
        expected /= expected.sum(-1, keepdim=True)
    found = exact.gate(logits, chosen, moe)
    torch.testing.assert_close(found, 1.5 * expected, atol=1e-6, rtol=1e-6)
    assert exact.gate(logits[7:8], chosen[7:8], moe).equal(found[7:8])


def test_gradients_are_those_of_the_plain_function() -> None:
    x, weight = X.clone().requires_grad_(), GAIN.clone().requires_grad_()
    value = with_gradient_of(
        lambda x, w: F.rms_norm(x, (48,), w, 1e-5), lambda x, w: exact.rms_norm(x, w, 1e-5, plus_one=False), x, weight
    )
    found = torch.autograd.grad((value * X.sin()).sum(), (x, weight))
    expected = torch.autograd.grad((F.rms_norm(x, (48,), weight, 1e-5) * X.sin()).sum(), (x, weight))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.equal(theirs)
    frozen = with_gradient_of(lambda x, w: x * w, lambda x, w: x * w, X, weight)
    assert torch.autograd.grad(frozen.sum(), weight)[0].equal(torch.autograd.grad((X * weight).sum(), weight)[0])


def test_a_machine_whose_functions_depend_on_the_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact.check_this_machine()  # this one is good
    exp = torch.exp

    def uneven(x: Tensor) -> Tensor:  # as a vectorized body with another function for the rest
        body = len(x) // 8 * 8
        return torch.cat([exp(x[:body]), exp(x[body:] * (1 + 1e-7))])

    monkeypatch.setattr(torch, "exp", uneven)
    with pytest.raises(exact.InexactMachineError, match="uneven of torch"):
        exact.check_this_machine.__wrapped__()
