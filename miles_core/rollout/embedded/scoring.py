"""Whole sequences without sampling: what the model thinks of given tokens."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from miles_core.rollout.embedded.decoder import Decoder
from miles_core.rollout.embedded.forward_pass import PromptPass
from miles_core.rollout.embedded.prompts import pad, padded_batches

_LOGIT_ROWS = 1024  # bounds the memory of logits


def score(decoder: Decoder, sequences: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
    """Log-prob of each token but the first after those before it, float32 [T - 1] for each sequence."""
    scores = [np.empty(0, dtype=np.float32)] * len(sequences)
    for index, hidden, _ in _run(decoder, sequences):
        targets = torch.as_tensor(sequences[index][1:], dtype=torch.int64).to(decoder.device)
        parts = [
            decoder.log_softmax(decoder.logits(part), temperature).gather(1, target.unsqueeze(1)).squeeze(1)
            for part, target in zip(hidden[:-1].split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True)
        ]
        scores[index] = torch.cat(parts).cpu().numpy()
    return scores


def top_k(
    decoder: Decoder, sequences: Sequence[np.ndarray], k: int, temperature: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The likeliest tokens in place of each but the first: ids int32 and log-probs float32, [T - 1, k] for each
    sequence, in falling order."""
    found = [(np.empty((0, k), dtype=np.int32), np.empty((0, k), dtype=np.float32))] * len(sequences)
    for index, hidden, _ in _run(decoder, sequences):
        parts = [
            decoder.log_softmax(decoder.logits(part), temperature).topk(k) for part in hidden[:-1].split(_LOGIT_ROWS)
        ]
        log_probs, ids = (torch.cat(pieces).cpu().numpy() for pieces in zip(*parts, strict=True))
        found[index] = ids.astype(np.int32), log_probs
    return found


def route(decoder: Decoder, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Experts taken by every token, int16 [T, layers, top_k] for each sequence, -1 in dense layers."""
    routes = [np.empty(0, dtype=np.int16)] * len(sequences)
    for index, _, chosen in _run(decoder, sequences):
        routes[index] = decoder.all_layers(chosen)
    return routes


def _run(decoder: Decoder, sequences: Sequence[np.ndarray]) -> Iterator[tuple[int, torch.Tensor, np.ndarray]]:
    """Index, final hidden states [T, hidden] and routes [T, MoE layers, top_k] of each sequence, in any order."""
    lengths = [len(ids) for ids in sequences]
    ropes = decoder.ropes(max(lengths, default=0))
    for batch in padded_batches(lengths):
        ids = pad([sequences[i] for i in batch])
        step = PromptPass(
            decoder.geometry, ropes, attention=decoder.attention, num_sequences=ids.shape[0], length=ids.shape[1]
        )
        hidden = decoder.forward(ids.flatten().to(decoder.device), step).unflatten(0, ids.shape)
        routes = step.recorded_routes().reshape(*ids.shape, len(decoder.moe_layers), decoder.top_k)
        for row, index in enumerate(batch):
            yield index, hidden[row, : lengths[index]], routes[row, : lengths[index]]
