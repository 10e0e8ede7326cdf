from collections.abc import Sequence

import numpy as np
import pytest

from miles_core.rollout.engine import Completion, GenerateRequest, SamplingParams
from miles_core.rollout.generate import generate_groups, rollout_metrics
from miles_core.seeds import derive_seed
from miles_core.types import Prompt, Sample, SampleGroup, SampleStatus


def answer(request: GenerateRequest, length: int = 2, log_probs: int | None = None) -> Completion:
    """Tokens that show the request's seed, so that tests see where it went."""
    return Completion(
        request_id=request.request_id,
        output_ids=np.array([request.seed % 1000, 7][:length], dtype=np.int32),
        log_probs=np.full(length if log_probs is None else log_probs, -0.5, dtype=np.float32),
        finish_reason="stop",
        weight_versions=np.full(length, 3, dtype=np.int32),
    )


def groups_of(prompts: Sequence[Prompt], first: int, generate=None) -> list[list[Sample]]:
    return generate_groups(
        prompts,
        first_group_index=first,
        n_samples_per_prompt=2,
        sampling=SamplingParams(),
        seed=5,
        generate=generate or (lambda requests: [answer(r) for r in requests]),
        decode=lambda ids: " ".join(map(str, ids)),
    )


PROMPTS = [Prompt(index=i, text=str(i), token_ids=np.array([1, 2, 3 + i], dtype=np.int32)) for i in range(3)]


def test_samples_carry_their_place_in_the_run() -> None:
    groups = groups_of(PROMPTS, first=10)
    assert [[s.index for s in g] for g in groups] == [[20, 21], [22, 23], [24, 25]]
    assert [g[0].group_index for g in groups] == [10, 11, 12]
    sample = groups[2][1]
    assert sample.tokens[:3].tolist() == [1, 2, 5] and sample.prompt_length == 3
    assert sample.tokens[3] == derive_seed(5, "sample", 25) % 1000


def test_seeds_differ_between_siblings_and_do_not_depend_on_the_batch() -> None:
    whole = groups_of(PROMPTS, first=0)
    parts = groups_of(PROMPTS[:1], first=0) + groups_of(PROMPTS[1:], first=1)
    assert [s.tokens.tolist() for g in whole for s in g] == [s.tokens.tolist() for g in parts for s in g]
    assert len({s.tokens[3] for g in whole for s in g}) == 6


def test_a_short_list_of_log_probs_is_an_error_that_names_both_numbers() -> None:
    with pytest.raises(ValueError, match="returned 1 log-probs for 2 tokens"):
        groups_of(PROMPTS, 0, lambda requests: [answer(r, log_probs=1) for r in requests])


def test_a_lost_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="answered 5 requests of 6"):
        groups_of(PROMPTS, 0, lambda requests: [answer(r) for r in requests[1:]])


def test_a_field_of_the_wrong_length_is_refused() -> None:
    sample = groups_of(PROMPTS, 0)[0][0]
    with pytest.raises(ValueError, match="routed_experts has 5 rows, 5 tokens need 4"):
        Sample(**{**sample.__dict__, "routed_experts": np.zeros((5, 2, 2), dtype=np.int16)})
    # Each call of a conversation brings the routes of all its tokens: appended, blocks of 4 and 9 rows would be 13.
    with pytest.raises(ValueError, match="routed_experts has 13 rows, 5 tokens need 4"):
        Sample(**{**sample.__dict__, "routed_experts": np.zeros((13, 2, 2), dtype=np.int16)})
    with pytest.raises(ValueError, match="loss_mask has 1 entries, the response 2 tokens"):
        Sample(**{**sample.__dict__, "loss_mask": np.ones(1, dtype=np.uint8)})


def test_failed_samples_count_in_no_reward_metric() -> None:
    def scored(sample: Sample, reward: float | None, status: SampleStatus) -> Sample:
        return Sample(**{**sample.__dict__, "reward": reward, "status": status})

    (a, b), (c, d), _ = groups_of(PROMPTS, 0)
    groups = [
        SampleGroup((scored(a, 1.0, SampleStatus.COMPLETED), scored(b, 0.0, SampleStatus.TRUNCATED))),
        SampleGroup((scored(c, 0.5, SampleStatus.COMPLETED), scored(d, None, SampleStatus.FAILED))),
    ]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/failed_samples"] == 1
    assert metrics["rollout/zero_std"] == 0.5
