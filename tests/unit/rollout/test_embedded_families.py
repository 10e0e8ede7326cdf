"""The embedded decoder against transformers: log-probs, greedy tokens and routed experts of every family."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from embedded_models import EOS, FAMILIES, VOCAB, write_model
from transformers import PreTrainedModel

from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.rollout.engine import Completion, GenerateRequest, SamplingParams

LENGTHS = (1, 2, 5, 8, 9, 13, 20, 27, 8)
NEW_TOKENS = 12


@dataclass
class Pair:
    """A model in both implementations, and what ours sampled."""

    model: PreTrainedModel
    engine: EmbeddedEngine
    requests: list[GenerateRequest]
    completions: list[Completion]

    def sequences(self) -> list[np.ndarray]:
        return [
            np.concatenate((request.prompt_ids, completion.output_ids))
            for request, completion in zip(self.requests, self.completions, strict=True)
        ]

    @torch.no_grad()
    def logits(self, ids: np.ndarray) -> torch.Tensor:
        """transformers' logits [T, vocab]."""
        return self.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_model(request.param, folder)
    rng = np.random.default_rng(0)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=rng.integers(4, VOCAB, size=length, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
            seed=i,
        )
        for i, length in enumerate(LENGTHS)
    ]
    # few rows, so that sequences enter while others are being decoded, and rows move
    engine = EmbeddedEngine(folder, max_batch_tokens=4 * (max(LENGTHS) + NEW_TOKENS))
    return Pair(model, engine, requests, engine.generate(requests))


def assert_log_probs_equal(ours: np.ndarray, logits: torch.Tensor, targets: np.ndarray) -> None:
    expected = logits.log_softmax(dim=-1).gather(1, torch.from_numpy(targets.astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * float(logits.abs().max()))


def test_log_probs_of_whole_sequences(pair: Pair) -> None:
    sequences = pair.sequences()
    for ids, ours in zip(sequences, pair.engine.score(sequences), strict=True):
        assert_log_probs_equal(ours, pair.logits(ids)[:-1], ids[1:])


def test_log_probs_of_sampled_tokens(pair: Pair) -> None:
    for ids, request, completion in zip(pair.sequences(), pair.requests, pair.completions, strict=True):
        start = len(request.prompt_ids)
        assert_log_probs_equal(completion.log_probs, pair.logits(ids)[start - 1 : -1], ids[start:])


def test_score_divides_logits_by_the_temperature(pair: Pair) -> None:
    ids = pair.sequences()[-1]
    assert_log_probs_equal(pair.engine.score([ids], temperature=0.7)[0], pair.logits(ids)[:-1] / 0.7, ids[1:])


def test_greedy_tokens_equal_generate(pair: Pair) -> None:
    width = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64), torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    for row, request in enumerate(pair.requests):
        ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    generated = pair.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)[:, width:]

    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
    for ours, theirs in zip(
        pair.engine.generate([replace(r, sampling=greedy) for r in pair.requests]), generated.tolist(), strict=True
    ):
        stop = theirs.index(EOS) + 1 if EOS in theirs else NEW_TOKENS
        assert ours.output_ids.tolist() == theirs[:stop]
        assert ours.finish_reason == ("stop" if EOS in theirs else "length")


def test_routed_experts_equal_the_router(pair: Pair) -> None:
    routers = [m for _, m in pair.model.named_modules() if type(m).__name__.lower().endswith("topkrouter")]
    if not routers:
        assert all(completion.routed_experts is None for completion in pair.completions)
        return
    chosen: list[np.ndarray] = []
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[2].numpy())) for router in routers]
    try:
        for ids, completion in zip(pair.sequences(), pair.completions, strict=True):
            chosen.clear()
            pair.logits(ids[:-1])  # the last token is never fed
            assert completion.routed_experts is not None
            routes, config = completion.routed_experts, pair.model.config
            layers, top_k = config.num_hidden_layers, config.num_experts_per_tok
            assert (routes.dtype, routes.shape) == (np.int16, (len(ids) - 1, layers, top_k))
            dense = layers - len(routers)
            assert (routes == -1).all(axis=(0, 2)).sum() == dense
            taken = routes[:, ~(routes == -1).all(axis=(0, 2))]
            np.testing.assert_array_equal(np.sort(taken, axis=-1), np.sort(np.stack(chosen, axis=1), axis=-1))
    finally:
        for hook in hooks:
            hook.remove()
