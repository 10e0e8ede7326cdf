"""The embedded engine as a server of requests: batching, seeds, stopping, aborting, bad input."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_models import EOS, VOCAB, write_model

from miles_core.rollout.embedded import moe
from miles_core.rollout.embedded.decoder import Decoder
from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.rollout.engine import Completion, GenerateRequest, SamplingParams

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm4_moe")
    write_model("glm4_moe", path)
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[EmbeddedEngine]:
    opened = EmbeddedEngine(folder)
    yield opened
    opened.close()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each forward pass."""
    counts: list[int] = []
    forward = Decoder.forward

    def counting(self, token_ids, step):
        counts.append(len(token_ids))
        return forward(self, token_ids, step)

    monkeypatch.setattr(Decoder, "forward", counting)
    return counts


def requests(lengths: Sequence[int], samples: int = 1, **sampling) -> list[GenerateRequest]:
    """`samples` requests for each of as many random prompts as there are lengths."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCAB, size=length, dtype=np.int32) for length in lengths]
    return [
        GenerateRequest(f"{i}.{j}", prompt, SamplingParams(**({"max_new_tokens": NEW_TOKENS} | sampling)), 100 * i + j)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    ]


def assert_same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.request_id, a.output_ids.tolist(), a.finish_reason) == (
            b.request_id,
            b.output_ids.tolist(),
            b.finish_reason,
        )
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
        np.testing.assert_array_equal(a.routed_experts, b.routed_experts)


def test_samples_of_a_prompt_differ_and_depend_on_their_seeds_alone(folder: Path) -> None:
    group = requests([5], samples=4)
    one, two = EmbeddedEngine(folder), EmbeddedEngine(folder)
    answers = one.generate(group)
    assert len({tuple(a.output_ids) for a in answers}) == 4
    assert_same(one.generate(group), answers)
    for _ in range(2):
        assert_same(one.generate(group[:2]) + two.generate(group[2:]), answers)


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_answers_do_not_depend_on_the_batch(folder: Path, engine: EmbeddedEngine, rows: int) -> None:
    asked = requests([3, 20, 1, 9, 14], samples=3)
    asked = [replace(r, sampling=replace(r.sampling, max_new_tokens=1 + i % 7)) for i, r in enumerate(asked)]
    expected = [engine.generate([r])[0] for r in asked]
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in asked)
    batched = EmbeddedEngine(folder, max_batch_tokens=rows * longest)
    assert_same(batched.generate(asked), expected)
    assert_same(batched.generate(asked[::-1]), expected[::-1])


def test_a_prompt_is_run_once_and_ended_rows_are_not_computed(engine: EmbeddedEngine, fed: list[int]) -> None:
    group = requests([6], samples=4, stop_token_ids=())
    limits = (1, 2, 2, 4)
    group = [replace(r, sampling=replace(r.sampling, max_new_tokens=n)) for r, n in zip(group, limits, strict=True)]
    answers = engine.generate(group)
    assert [len(a.output_ids) for a in answers] == list(limits)
    assert fed == [6, 3, 1, 1]


def test_experts_run_alike_for_many_tokens_and_for_few(
    folder: Path, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests([3, 20, 9], samples=2)
    by_all_experts = engine.generate(asked)
    monkeypatch.setattr(moe, "_CHEAP_WASTE", 0)
    assert_same(EmbeddedEngine(folder).generate(asked), by_all_experts)


def test_arrays_have_the_promised_lengths_and_types(engine: EmbeddedEngine) -> None:
    for request, answer in zip(asked := requests([4, 7]), engine.generate(asked), strict=True):
        n = len(answer.output_ids)
        assert (answer.output_ids.dtype, answer.log_probs.dtype, answer.weight_versions.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )
        assert len(answer.log_probs) == len(answer.weight_versions) == n
        assert answer.routed_experts is not None
        assert len(answer.routed_experts) == len(request.prompt_ids) + n - 1
    assert engine.generate([]) == []


def test_stop_tokens_of_a_request_end_it_alone(engine: EmbeddedEngine) -> None:
    first, second = requests([5], samples=2, temperature=0.0)
    free = engine.generate([first])[0].output_ids.tolist()
    stop = free[2]
    end = free.index(stop) + 1
    stopping = replace(first, sampling=replace(first.sampling, stop_token_ids=(stop,)))
    stopped, other = engine.generate([stopping, second])
    assert (stopped.output_ids.tolist(), stopped.finish_reason) == (free[:end], "stop")
    assert other.output_ids.tolist() == free


@pytest.mark.parametrize(
    ("generation_config", "config_eos", "stops"),
    [
        (None, 11, {11}),
        (None, None, set()),
        ({"eos_token_id": [12, 13]}, 11, {12, 13}),
        ({"eos_token_id": 12, "temperature": 0.6}, None, {12}),
        ({}, [11, VOCAB + 5], {11}),
    ],
)
def test_end_of_sequence_tokens(folder: Path, tmp_path: Path, generation_config, config_eos, stops: set[int]) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text()) | {"eos_token_id": config_eos}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").unlink()
    if generation_config is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation_config))
    answers = EmbeddedEngine(copy).generate(requests([5], samples=64, max_new_tokens=40))
    ends = {int(a.output_ids[-1]) for a in answers if a.finish_reason == "stop"}
    inside = {int(t) for a in answers for t in a.output_ids[:-1]}
    assert ends == stops
    assert not inside & stops
    assert EOS in inside  # not special here


def test_abort_returns_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests([4, 4, 4], max_new_tokens=20)
    engine = EmbeddedEngine(folder, max_batch_tokens=2 * 23)  # the third waits
    engine.abort()  # without a running call: nothing
    whole = engine.generate(asked)
    forward, passes = Decoder.forward, []

    def aborting(self, token_ids, step):
        passes.append(len(token_ids))
        if len(passes) == 3:
            engine.abort()
        return forward(self, token_ids, step)

    monkeypatch.setattr(Decoder, "forward", aborting)
    for answer, complete in zip(parts := engine.generate(asked), whole, strict=True):
        n = len(answer.output_ids)
        assert answer.finish_reason == "abort"
        np.testing.assert_array_equal(answer.output_ids, complete.output_ids[:n])
        np.testing.assert_allclose(answer.log_probs, complete.log_probs[:n], atol=1e-5)
    assert [len(a.output_ids) for a in parts] == [3, 3, 0]
    assert [None if a.routed_experts is None else len(a.routed_experts) for a in parts] == [6, 6, None]
    monkeypatch.undo()
    assert_same(engine.generate(asked), whole)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "0 prompt tokens"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([5, VOCAB], {}, f"token ids from 5 to {VOCAB}"),
        ([5, -1], {}, "token ids from -1"),
        ([5], {"stop_token_ids": (99,)}, "to 99"),
        ([5] * 60, {}, "exceed max_position_embeddings 64"),
        ([5] * 40, {}, "rollout.max_batch_tokens"),
    ],
)
def test_impossible_requests_are_refused_before_any_runs(
    folder: Path, fed: list[int], prompt: list[int], sampling: dict, message: str
) -> None:
    engine = EmbeddedEngine(folder, max_batch_tokens=46)
    params = SamplingParams(**({"max_new_tokens": NEW_TOKENS} | sampling))
    bad = GenerateRequest("bad", np.array(prompt, dtype=np.int32), params, 0)
    with pytest.raises(ValueError, match=message):
        engine.generate([*requests([4]), bad])
    assert fed == []


def test_bfloat16_stays_close_to_float32(folder: Path, engine: EmbeddedEngine) -> None:
    half = EmbeddedEngine(folder, dtype="bfloat16")
    sequences = [r.prompt_ids for r in requests([20, 30])]
    for exact, rounded in zip(engine.score(sequences), half.score(sequences), strict=True):
        assert np.abs(exact - rounded).mean() < 0.05
    answer = half.generate(requests([5]))[0]
    whole = np.concatenate((requests([5])[0].prompt_ids, answer.output_ids))
    assert np.abs(half.score([whole])[0][4:] - answer.log_probs).max() < 0.2


def test_threads_are_set_only_on_request(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        EmbeddedEngine(folder)
        assert torch.get_num_threads() == before
        EmbeddedEngine(folder, num_threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    engine.close()
    engine.close()
    for call in (lambda: engine.generate([]), engine.weight_version, engine.weight_digests):
        with pytest.raises(RuntimeError, match="closed"):
            call()
