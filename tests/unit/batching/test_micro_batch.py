"""Where each token and each per-token value stands in a forward pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_core.batching.micro_batch import MicroBatch, build_micro_batch
from miles_core.batching.sharding import MicroBatchPlan, plan_micro_batches
from miles_core.types import TrainSample


def _sample(index: int, tokens: list[int], response_length: int) -> TrainSample:
    """Per-token values that name their token: loss weight 0.01 x token, advantage -token, log-prob -0.1 x token."""
    response = np.array(tokens[len(tokens) - response_length :], dtype=np.float32)
    return TrainSample(
        index=index,
        tokens=np.array(tokens, dtype=np.int32),
        response_length=response_length,
        loss_mask=(response % 2 == 0).astype(np.uint8),
        loss_weights=0.01 * response,
        advantages=-response,
        rollout_log_probs=-0.1 * response,
    )


_A = _sample(7, [10, 11, 12], 1)  # the example of the module's docstring
_B = _sample(8, [20, 21, 22, 23], 2)
_PLAN = MicroBatchPlan((0, 1), rows=2, row_length=4, total_length=7)


def _check_response_fields(micro_batch: MicroBatch) -> None:
    flat = micro_batch.tokens.T.flatten()
    targets = micro_batch.targets
    assert targets.tolist() == [12, 22, 23]
    assert flat[micro_batch.logit_positions].tolist() == [11, 21, 22]  # the token before each
    assert micro_batch.sequence_ids.tolist() == [0, 1, 1]
    assert micro_batch.loss_mask.tolist() == [True, True, False]
    torch.testing.assert_close(micro_batch.loss_weights, 0.01 * targets)
    torch.testing.assert_close(micro_batch.advantages, -targets.float())
    torch.testing.assert_close(micro_batch.rollout_log_probs, -0.1 * targets)
    assert flat[micro_batch.fed_rows].tolist() == [10, 11, 20, 21, 22]
    assert [t.tolist() for t in micro_batch.split(targets)] == [[12], [22, 23]]


def test_padded() -> None:
    micro_batch = build_micro_batch([_A, _B], _PLAN, packing=False)
    assert micro_batch.tokens.tolist() == [[10, 11, 12, 0], [20, 21, 22, 23]]
    assert micro_batch.packed is None
    assert micro_batch.logit_positions.tolist() == [2, 3, 5]
    _check_response_fields(micro_batch)


def test_packed() -> None:
    micro_batch = build_micro_batch([_A, _B], _PLAN, packing=True)
    assert micro_batch.tokens.tolist() == [[10, 11, 12, 20, 21, 22, 23]]
    assert micro_batch.logit_positions.tolist() == [1, 4, 5]
    layout = micro_batch.packed
    assert layout is not None
    assert layout.offsets.tolist() == [0, 3, 7]
    assert layout.longest == 4
    assert (layout.count, layout.places.tolist()) == (2, [0, 1, 2, 4, 5, 6, 7])
    _check_response_fields(micro_batch)


@pytest.mark.parametrize("packing", [True, False])
def test_padding_to_the_shape_of_the_largest_rank(packing: bool) -> None:
    """Longer than its own samples need, and a multiple of the tensor-parallel size."""
    plan = replace(_PLAN, rows=3, row_length=5, total_length=9)
    micro_batch = build_micro_batch([_A, _B], plan, packing=packing, length_multiple=2)
    assert tuple(micro_batch.tokens.shape) == ((1, 10) if packing else (3, 6))
    _check_response_fields(micro_batch)
    if packing:
        assert micro_batch.packed is not None
        assert micro_batch.packed.offsets.tolist() == [0, 3, 7, 10]  # padding is a sequence of its own


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_without_samples_still_takes_part(packing: bool) -> None:
    micro_batch = build_micro_batch([_A], MicroBatchPlan((), 1, 3, 3), packing=packing)
    assert micro_batch.tokens.tolist() == [[0, 0, 0]]
    assert len(micro_batch.targets) == len(micro_batch.logit_positions) == len(micro_batch.fed_rows) == 0


@pytest.mark.parametrize("packing", [True, False])
def test_random_samples_are_placed_by_position(packing: bool) -> None:
    rng = np.random.default_rng(0)
    batch = []
    for i in range(20):
        length = int(rng.integers(2, 12))
        batch.append(_sample(i, rng.integers(1, 1000, length).tolist(), int(rng.integers(0, length))))
    for ranks in plan_micro_batches([len(s.tokens) for s in batch], data_size=2, micro_batch_size=3):
        for plan in ranks:
            micro_batch = build_micro_batch(batch, plan, packing=packing)
            flat = micro_batch.tokens.T.flatten()
            before, responses = [], []
            for i in plan.samples:
                tokens, start = batch[i].tokens, len(batch[i].tokens) - batch[i].response_length
                before += tokens[start - 1 : -1].tolist()
                responses += tokens[start:].tolist()
            assert flat[micro_batch.logit_positions].tolist() == before
            assert micro_batch.targets.tolist() == responses


def test_optional_fields_are_all_or_none() -> None:
    with_old = [replace(s, old_log_probs=s.rollout_log_probs) for s in (_A, _B)]
    both = build_micro_batch(with_old, _PLAN, packing=True)
    assert both.old_log_probs is not None
    assert both.old_log_probs.equal(both.rollout_log_probs)
    assert build_micro_batch([_A, _B], _PLAN, packing=True).old_log_probs is None
    with pytest.raises(ValueError, match=r"old_log_probs: samples \[8\] have none"):
        build_micro_batch([with_old[0], _B], _PLAN, packing=True)


def test_a_response_without_a_prompt_is_refused() -> None:
    sample = _sample(3, [5, 6], 2)
    with pytest.raises(ValueError, match="sample 3 has no prompt token"):
        build_micro_batch([sample], MicroBatchPlan((0,), 1, 2, 2), packing=True)
