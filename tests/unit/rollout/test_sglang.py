import base64
import json
from pathlib import Path

import numpy as np
import pytest

from miles_core.rollout.engine import GenerateRequest, SamplingParams
from miles_core.rollout.sglang.client import Refused
from miles_core.rollout.sglang.server import ServerError
from miles_core.rollout.sglang.wire import WireError, generate_payload, to_completion

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "sglang_wire.json").read_text())  # Qwen3-MoE of 12 layers, top 4; 64 tokens in, 8 out


def request(prompt: list[int], new: int, stop: tuple[int, ...] = (), name: str = "r0") -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=new, stop_token_ids=stop)
    return GenerateRequest(name, np.array(prompt, dtype=np.int32), sampling, seed=7)


def test_the_recorded_answer_is_read_in_full() -> None:
    prompt = RECORDED["request"]["input_ids"][0]
    completion = to_completion(request(prompt, 8), RECORDED["answer"][0], layers=12, top_k=4, default_version=9)
    assert completion.output_ids.tolist() == RECORDED["answer"][0]["output_ids"]
    assert completion.log_probs[0] == pytest.approx(-10.26797103881836)
    assert completion.weight_versions.tolist() == [0] * 8
    assert completion.routed_experts.shape == (64 + 8 - 1, 12, 4)
    assert completion.routed_experts[0, 0].tolist() == [10, 17, 0, 1]
    assert completion.finish_reason == "length"


def test_our_request_has_the_recorded_form() -> None:
    prompt = RECORDED["request"]["input_ids"][0]
    ours = generate_payload([request(prompt, 8)], routed_experts=True, deterministic=False)
    assert ours.keys() == RECORDED["request"].keys()
    assert ours["sampling_params"][0].keys() == RECORDED["request"]["sampling_params"][0].keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_token_logprobs": [[-1.0, 5, None]], "completion_tokens": 12}, "1 log-probs for 12 tokens"),
        ({"output_token_logprobs": None}, "no output_token_logprobs"),
        ({"routed_experts": None}, "enable_return_routed_experts"),
        ({"routed_experts": base64.b64encode(b"\0" * 4 * 48 * 70).decode()}, "71 tokens x 12 layers x 4 experts"),
    ],
)
def test_a_short_answer_is_an_error(change: dict, said: str) -> None:
    answer = {"meta_info": RECORDED["answer"][0]["meta_info"] | change}
    with pytest.raises(WireError, match=said):
        to_completion(request(RECORDED["request"]["input_ids"][0], 8), answer, layers=12, top_k=4, default_version=0)


def test_answers_come_in_order_with_stop_tokens_and_routes(start) -> None:
    engine = start()
    asked = [request([1, 2, 10 * i], 4, stop=(10 * i + 2,) if i % 2 else (), name=f"r{i}") for i in range(5)]
    answers = engine.generate(asked)
    assert [a.request_id for a in answers] == ["r0", "r1", "r2", "r3", "r4"]
    assert [a.output_ids.tolist() for a in answers[:2]] == [[1, 2, 3, 4], [11, 12]]
    assert [a.finish_reason for a in answers] == ["length", "stop", "length", "stop", "length"]
    assert [len(a.routed_experts) for a in answers] == [6, 4, 6, 4, 6]
    assert answers[1].log_probs.tolist() == pytest.approx([-0.011, -0.012])


def test_a_server_that_dies_is_replaced_and_only_what_was_lost_is_asked_again(start, model) -> None:
    engine = start(max_calls=1)
    asked = [request([i], 3, name=f"r{i}") for i in range(6)]
    expected = [a.output_ids.tolist() for a in engine.generate(asked)]
    (model / "die").touch()
    first = engine._server.url
    answers = engine.generate(asked)
    assert [a.output_ids.tolist() for a in answers] == expected
    assert [a.request_id for a in answers] == [f"r{i}" for i in range(6)]
    assert engine._server.url != first


def test_too_many_deaths_end_the_run_with_the_log(start, model) -> None:
    engine = start(max_restarts=0)
    (model / "die").touch()
    with pytest.raises(ServerError, match=r"rollout\.sglang\.max_restarts"):
        engine.generate([request([1], 3)])


def test_a_refusal_is_not_retried_and_shows_the_servers_words(start) -> None:
    with pytest.raises(Refused, match=r"400.*maximum context length"):
        start().generate([request([1], 200)])


def test_a_server_that_cannot_start_shows_the_end_of_its_log(start) -> None:
    with pytest.raises(ServerError, match="unknown attention backend"):
        start(server_args={"fail_at_start": True})
