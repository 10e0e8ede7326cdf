"""Plans of micro-batches: every sample once, equal passes, balanced ranks."""

import numpy as np
import pytest

from miles_core.batching.sharding import MicroBatchPlan, plan_micro_batches


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
@pytest.mark.parametrize("data_size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 7, 24])
def test_every_sample_once_and_shapes_common(count: int, data_size: int, micro_batch_size: int) -> None:
    lengths = np.random.default_rng(count).integers(1, 100, count).tolist()
    passes = plan_micro_batches(lengths, data_size=data_size, micro_batch_size=micro_batch_size)
    taken = sorted(i for ranks in passes for plan in ranks for i in plan.samples)
    assert taken == list(range(count))
    assert len(passes) == -(-count // (data_size * micro_batch_size))
    for ranks in passes:
        assert len(ranks) == data_size
        assert len({(p.rows, p.row_length, p.total_length) for p in ranks}) == 1
        for plan in ranks:
            own = [lengths[i] for i in plan.samples]
            assert len(own) <= plan.rows <= micro_batch_size
            assert max(own, default=0) <= plan.row_length
            assert sum(own) <= plan.total_length


def test_ranks_differ_by_less_than_one_sample() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 64).tolist()
    passes = plan_micro_batches(lengths, data_size=4, micro_batch_size=4)
    load = [sum(lengths[i] for ranks in passes for i in ranks[r].samples) for r in range(4)]
    assert max(load) - min(load) < max(lengths)


def test_a_small_plan_by_hand() -> None:
    """Sorted 9, 5, 4, 2: rank 0 gets 9, rank 1 gets 5 and 4, rank 0 is full only with 2."""
    assert plan_micro_batches([4, 9, 2, 5], data_size=2, micro_batch_size=2) == [
        (
            MicroBatchPlan((1, 2), rows=2, row_length=9, total_length=11),
            MicroBatchPlan((3, 0), rows=2, row_length=9, total_length=11),
        )
    ]


def test_the_last_pass_may_leave_a_rank_without_samples() -> None:
    first, last = plan_micro_batches([3, 3, 3], data_size=2, micro_batch_size=1)
    assert [p.samples for p in first] == [(0,), (1,)]
    assert [p.samples for p in last] == [(2,), ()]
    assert last[1].total_length == 3


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        plan_micro_batches([], data_size=1, micro_batch_size=1)
