"""What a rollout is made of: dynamic sampling, given answers, and positions that resume."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from miles_core.config.run import RunConfig
from miles_core.data.conversations import Conversation
from miles_core.data.source import PromptSource
from miles_core.rollout.collect import Collector, RolloutCollector
from miles_core.rollout.collect_conversations import ConversationCollector
from miles_core.rollout.engine import Completion, GenerateRequest, SamplingParams
from miles_core.types import Prompt, Sample, SampleGroup, SampleStatus

PROMPTS = [Prompt(i, str(i), np.array([1, 2, 3 + i], dtype=np.int32)) for i in range(10)]
CONVERSATIONS = [
    Conversation(i, np.arange(6, dtype=np.int32) + i, np.array([0, 0, 1, 1, 0, 1], dtype=np.uint8)) for i in range(5)
]


def config(**rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"task": {}},
            "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, **rollout},
            "trainer": {"micro_batch_size": 1},
        }
    )


def answer(requests: Sequence[GenerateRequest]) -> list[Completion]:
    return [
        Completion(
            r.request_id, np.array([7, 8], dtype=np.int32), np.zeros(2, np.float32), "stop", np.zeros(2, np.int32)
        )
        for r in requests
    ]


def scorer(
    spread: Callable[[Sample], bool],
) -> Callable[[list[list[Sample]]], tuple[list[SampleGroup], dict[str, float]]]:
    """The second response of a group scores 1 where `spread` says so, every other one 0."""

    def score(groups: list[list[Sample]]) -> tuple[list[SampleGroup], dict[str, float]]:
        scored = [
            SampleGroup(tuple(Sample(**{**s.__dict__, "reward": float(i == 1 and spread(s))}) for i, s in enumerate(g)))
            for g in groups
        ]
        return scored, {"rollout/no_answer": 1.0}

    return score


def collector(run: RunConfig, spread: Callable[[Sample], bool]) -> RolloutCollector:
    source = PromptSource(PROMPTS, seed=0, shuffle=False)
    return RolloutCollector(run, source, SamplingParams(), generate=answer, decode=str, score=scorer(spread))


def test_without_dynamic_sampling_every_group_is_used() -> None:
    groups, metrics = collector(config(), lambda s: s.prompt_index % 2 == 0).collect()
    assert [g.samples[0].prompt_index for g in groups] == [0, 1, 2, 3]
    assert metrics["rollout/zero_std"] == 0.5


def test_groups_without_spread_are_replaced_and_everything_is_accounted_for() -> None:
    run = config(dynamic_sampling=True, over_sampling_batch_size=6)
    groups, metrics = collector(run, lambda s: s.prompt_index % 2 == 1).collect()
    # Of the prompts 0-5 and 6-9, 0, 1 the odd ones have a spread: 1, 3, 5, 7, 9, 1; four are needed.
    assert [g.samples[0].prompt_index for g in groups] == [1, 3, 5, 7]
    assert [g.group_index for g in groups] == [1, 3, 5, 7]
    assert metrics["rollout/dynamic_filter/dropped_groups"] == 6
    assert metrics["rollout/dynamic_filter/unused_groups"] == 2
    assert metrics["rollout/raw_reward"] == 0.25  # of all sampled groups
    assert metrics["rollout/no_answer"] == 2.0  # added up over the rounds


def test_a_task_without_spread_ends_the_run() -> None:
    run = config(dynamic_sampling=True, max_sampling_rounds=3)
    with pytest.raises(RuntimeError, match=r"found 0 groups with unequal rewards among 12 sampled in 3 rounds"):
        collector(run, lambda s: False).collect()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_rollout_after_a_resume_is_the_one_that_would_have_come(dynamic: bool) -> None:
    def fresh() -> Collector:
        return collector(config(dynamic_sampling=dynamic), lambda s: s.prompt_index != 2)

    _check_resume(fresh)


def test_conversations_resume_too() -> None:
    _check_resume(lambda: ConversationCollector(config(), PromptSource(CONVERSATIONS, seed=3)))


def _check_resume(fresh: Callable[[], Collector]) -> None:
    def tokens(groups: list[SampleGroup]) -> list[Any]:
        return [(s.index, s.tokens.tolist()) for g in groups for s in g.samples]

    whole, resumed = fresh(), fresh()
    whole.collect()
    resumed.load_state_dict(whole.state_dict())
    assert tokens(resumed.collect()[0]) == tokens(whole.collect()[0])


def test_a_conversation_becomes_a_sample_whose_response_begins_with_the_first_token_to_learn() -> None:
    groups, metrics = ConversationCollector(config(), PromptSource(CONVERSATIONS, seed=0, shuffle=False)).collect()
    (sample,) = groups[1].samples
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (sample.response_length, sample.loss_mask.tolist()) == (4, [1, 1, 0, 1])
    assert (sample.reward, sample.status, set(sample.weight_versions)) == (None, SampleStatus.COMPLETED, {-1})
    assert (len(groups), metrics["rollout/total_len/mean"]) == (4, 6)


def test_the_very_first_token_is_never_learned() -> None:
    only = [Conversation(0, np.array([4, 5], dtype=np.int32), np.array([1, 1], dtype=np.uint8))]
    groups, _ = ConversationCollector(config(), PromptSource(only, seed=0)).collect()
    assert (groups[0].samples[0].prompt_length, groups[0].samples[0].loss_mask.tolist()) == (1, [1])


def test_each_conversation_comes_once_an_epoch() -> None:
    collected = ConversationCollector(config(), PromptSource(CONVERSATIONS, seed=1))
    seen = [g.samples[0].prompt_index for _ in range(5) for g in collected.collect()[0]]
    assert [sorted(seen[i : i + 5]) for i in range(0, 20, 5)] == [list(range(5))] * 4


def test_a_position_in_other_conversations_is_refused() -> None:
    state = PromptSource(CONVERSATIONS, seed=0).state_dict()
    changed = [*CONVERSATIONS[:-1], Conversation(4, CONVERSATIONS[4].token_ids, 1 - CONVERSATIONS[4].loss_mask)]
    with pytest.raises(ValueError, match="the saved position is not one in these 5 prompts"):
        PromptSource(changed, seed=0).load_state_dict(state)
