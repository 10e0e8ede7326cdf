"""From logits to tokens, as a function of each request's own seed."""

from collections.abc import Callable

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) of 53 bits, float64 [rows]: number `steps` of the streams `seeds`, both uint64.

    Counter-based, so that a request's numbers depend on nothing but its seed: SplitMix64 (Steele, Lea, Flood:
    "Fast splittable pseudorandom number generators", 2014), its initial state being the mixed seed.
    """
    bits = _mix(_mix(seeds) + (steps + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def scaled_log_softmax(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """log softmax(logits / temperature) over the last dim, in float32."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


LogSoftmax = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [rows, vocab], temperature [rows, 1]) -> log softmax(logits / temperature), float32 [rows, vocab]."""


def sample(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniforms: np.ndarray,
    log_softmax: LogSoftmax = scaled_log_softmax,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, by inverting the cumulative distribution in the order of the vocabulary.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows]; 0 takes the most likely token.
        top_k: int64 [rows]; below 1 keeps all.
        top_p: float32 [rows]; applied to the whole distribution, so that a token must pass both filters.
        uniforms: float64 [rows] in [0, 1).
        log_softmax: the decoder's.

    Returns:
        Tokens int64 [rows], and their log-probs float32 [rows] in the unfiltered distribution at this temperature,
        at temperature 1 where it is 0. Logits that are not finite give log-probs that are not.
    """
    device, greedy = logits.device, temperature == 0
    divisor = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device)
    log_probs = log_softmax(logits, divisor.unsqueeze(1))
    if greedy.all():
        tokens = log_probs.argmax(dim=-1, keepdim=True)
    else:
        probs = log_probs.exp()
        filtered = np.flatnonzero((top_k > 0) | (top_p < 1))
        if len(filtered):
            rows = torch.from_numpy(filtered).to(device)
            probs[rows] = _filter(probs[rows], top_k[filtered], top_p[filtered])
        # float64: the product with a number below 1 stays below the last entry, so the search ends inside
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        targets = torch.from_numpy(uniforms).to(device).unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, targets, right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)  # NaN is never reached; the log-prob will tell
        if greedy.any():
            best = log_probs.argmax(dim=-1, keepdim=True)
            tokens = torch.where(torch.from_numpy(greedy).to(device).unsqueeze(1), best, tokens)
    return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)


def _filter(probs: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """probs [rows, vocab] with 0 outside the top_k likeliest tokens and outside the smallest set that reaches top_p."""
    device, vocab = probs.device, probs.shape[-1]
    likeliest, order = probs.sort(dim=-1, descending=True, stable=True)
    before = likeliest.cumsum(dim=-1) - likeliest
    k = torch.from_numpy(np.where(top_k > 0, top_k, vocab)).to(device).unsqueeze(1)
    p = torch.from_numpy(top_p).to(device).unsqueeze(1)
    kept = (before < p) & (torch.arange(vocab, device=device) < k)
    return probs.masked_fill(~torch.empty_like(kept).scatter_(1, order, kept), 0.0)
