"""What a decoder computes, each function giving a token the same bits wherever the token lies.

Sums go through sums.py. All other steps work on single numbers, by operations that IEEE 754 rounds in one way (+, -, *,
/, square root), or by exp, log, tanh, sin and cos of torch, which `check_this_machine` tries.
"""

import functools
import math

import torch
from torch import Tensor

from conversion.geometry import MoeGeometry
from miles_core.exact.sums import WholeRows, bits_of_factors, product, sum_of_fractions, sum_of_squares


class InexactMachineError(RuntimeError):
    """An elementary function of torch gives a number other bits depending on where it lies in a tensor."""


@functools.cache
def check_this_machine() -> None:
    """Computes each elementary function on parts of a tensor that begin and end anywhere, and compares with the whole.

    Raises InexactMachineError with the functions that fail: then exact mode is not to be had on this machine.
    """
    x = torch.linspace(-20, 20, 4099, dtype=torch.float64)
    failed = []
    for function in (torch.exp, torch.log, torch.tanh, torch.sin, torch.cos):
        for dtype in (torch.float32, torch.float64):
            given = (x.abs() + 0.01 if function is torch.log else x).to(dtype)
            whole = function(given)
            parts = [slice(start, start + length) for length in range(1, 68) for start in (length, 17 * length)]
            if any(not torch.equal(function(given[part].clone()), whole[part]) for part in parts):
                failed.append(f"{function.__name__} of {dtype}")
    if failed:
        raise InexactMachineError(
            f"trainer.exact=true needs functions of torch that do not depend on where a number lies, not so here: "
            f"{', '.join(failed)}; set trainer.exact=false"
        )


def weight_rows(weight: Tensor) -> WholeRows:
    """A matrix [N, K] as `linear` takes it."""
    return WholeRows.of(weight, bits_of_factors(weight.shape[-1])[1])


def linear(x: Tensor, weight: WholeRows, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], in `dtype` (by default x's): [..., N]."""
    rows = WholeRows.of(x.flatten(0, -2), bits_of_factors(x.shape[-1])[0])
    out = product(rows, weight).to(dtype or x.dtype).unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Gemma: 1 + weight) over the last dim, rounded once, in x's dtype."""
    rms = (sum_of_squares(x) / x.shape[-1] + eps).sqrt_()
    weight = weight.double()
    return (x.double() / rms * (1 + weight if plus_one else weight)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); torch's own gives other bits at the end of a row."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), in x's dtype."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu by its tanh approximation, in x's dtype."""
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def activation(name: str, x: Tensor) -> Tensor:
    """By the geometry's name of it."""
    return silu(x) if name == "silu" else gelu_tanh(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + d / 2) of the first d dims turned by their angles; x [..., dim], cos and sin float32 [..., d / 2].

    Differentiable. In float32, rounded to x's dtype.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, max_length: int
) -> Tensor:
    """softmax(softcap(q k^T * scale)) v over the visible keys.

    Args:
        q: [..., queries, d].
        k: [..., columns, d].
        v: [..., columns, dv].
        visible: bool, broadcastable to [..., queries, columns].
        scale: factor on q k^T.
        softcap: bound c of the scores, c * tanh(score / c).
        max_length: the model's; no row has more visible keys. Decides how finely weights and values are rounded.

    Returns:
        [..., queries, dv] in v's dtype.
    """
    query_bits, key_bits = bits_of_factors(q.shape[-1])
    scores = product(WholeRows.of(q, query_bits), WholeRows.of(k, key_bits)).mul_(scale).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = sum_of_fractions(weights, max_length)
    # Units of the values go to the weights, so that products share one unit a query, that of its largest.
    weight_bits, value_bits = bits_of_factors(max_length)
    values = WholeRows.of(v, value_bits)
    rows = WholeRows.of(weights * values.unit.mT, weight_bits)
    return ((rows.numbers @ values.numbers).mul_(rows.unit) / total).to(v.dtype)


def gate(logits: Tensor, chosen: Tensor, moe: MoeGeometry) -> Tensor:
    """Gate weights of the chosen experts, 0 elsewhere: float32 logits, bool chosen -> float32, all [tokens, experts].

    Does not depend on the order in which experts were chosen.
    """
    if moe.score == "sigmoid":
        scores, normed = sigmoid(logits), moe.norm_topk
    else:
        among = logits.masked_fill(~chosen, -torch.inf) if moe.norm_topk else logits
        scores, normed = torch.exp(among - among.amax(-1, keepdim=True)), True
    counted = scores.masked_fill(~chosen, 0.0) if moe.norm_topk else scores
    weights = (scores / sum_of_fractions(counted, moe.num_experts)).float() if normed else scores
    weights = weights.masked_fill(~chosen, 0.0)
    return weights if moe.routed_scaling == 1 else weights * moe.routed_scaling


def log_softmax(logits: Tensor) -> Tensor:
    """float32 [..., vocab] -> log-probs float32 of the same shape, rounded once."""
    shifted = logits - logits.amax(-1, keepdim=True)
    total = sum_of_fractions(torch.exp(shifted), logits.shape[-1])
    return (shifted.double() - total.log()).float()
