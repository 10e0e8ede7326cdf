import json
from collections import Counter

import numpy as np
import pytest

from miles_core.data.rows import DataError
from miles_core.data.source import PromptSource
from miles_core.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, f"{index}", np.array([index], dtype=np.int32)) for index in range(count)]


def indices(batch: list[Prompt]) -> list[int]:
    return [prompt.index for prompt in batch]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "batch", "batches"), [(8, 4, 4), (8, 3, 8), (5, 12, 5), (1, 3, 2), (7, 7, 3)])
def test_each_prompt_is_served_once_an_epoch(count: int, batch: int, batches: int, shuffle: bool) -> None:
    source = PromptSource(prompts(count), seed=1, shuffle=shuffle)
    served = [index for _ in range(batches) for index in indices(source.next(batch))]
    assert len(served) == batch * batches
    epochs, rest = divmod(len(served), count)
    for epoch in range(epochs):
        assert sorted(served[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert max(Counter(served).values()) == epochs + bool(rest)
    assert source.epoch == epochs
    if not shuffle:
        assert served == [i % count for i in range(len(served))]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def epochs(seed: int, batch: int) -> list[list[int]]:
        source = PromptSource(prompts(32), seed=seed)
        served = [index for _ in range(64 // batch) for index in indices(source.next(batch))]
        return [served[:32], served[32:]]

    assert epochs(3, 8) == epochs(3, 16) == epochs(3, 64)
    first, second = epochs(3, 8)
    assert first != second
    assert first != epochs(4, 8)[0]
    assert first != list(range(32))


@pytest.mark.parametrize("saved_after", range(5))
@pytest.mark.parametrize("batch", [4, 3, 11])
def test_a_resumed_source_goes_on_as_if_never_stopped(saved_after: int, batch: int) -> None:
    """Includes the border of an epoch: 8 prompts, batches of 4, saved after 2 or 4."""
    whole = PromptSource(prompts(8), seed=0)
    expected = [indices(whole.next(batch)) for _ in range(6)]
    source = PromptSource(prompts(8), seed=0)
    before = [indices(source.next(batch)) for _ in range(saved_after)]
    resumed = PromptSource(prompts(8), seed=0)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert before + [indices(resumed.next(batch)) for _ in range(6 - saved_after)] == expected


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptSource(prompts(9), seed=0), "prompts is"),
        (PromptSource([*prompts(7), Prompt(7, "7", np.array([6], dtype=np.int32))], seed=0), "prompts is"),
        (PromptSource([*prompts(7), Prompt(7, "7", np.array([7], dtype=np.int32), label="x")], seed=0), "prompts is"),
        (PromptSource(prompts(8), seed=1), "seed is 0, the saved state has 1"),
        (PromptSource(prompts(8), seed=0, shuffle=False), "shuffle is True, the saved state has False"),
    ],
    ids=["more prompts", "other tokens", "other label", "other seed", "other order"],
)
def test_a_position_in_other_prompts_is_refused(other: PromptSource, named: str) -> None:
    source = PromptSource(prompts(8), seed=0)
    source.next(3)
    expected = indices(PromptSource(prompts(8), seed=0).next(6))[3:]
    with pytest.raises(DataError, match=named):
        source.load_state_dict(other.state_dict())
    assert indices(source.next(3)) == expected  # and it stays where it was


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(DataError, match="no prompts to draw from"):
        PromptSource([], seed=0)
