import threading

import pytest

from storage.parts import MiB, in_order, plan_parts

GiB = 1024 * MiB


@pytest.mark.parametrize(
    ("size", "default_part", "part_size", "count"),
    [
        (100 * GiB, 8 * MiB, 10_737_419, 10_000),  # 12,800 parts of 8 MiB would be refused
        (1, 8 * MiB, 8 * MiB, 1),
        (0, 8 * MiB, 8 * MiB, 1),
        (23 * MiB, 5 * MiB, 5 * MiB, 5),
        (10 * MiB, 5 * MiB, 5 * MiB, 2),
        (8 * MiB * 10_000, 8 * MiB, 8 * MiB, 10_000),
        (8 * MiB * 10_000 + 1, 8 * MiB, 8 * MiB + 1, 10_000),
    ],
)
def test_plan(size: int, default_part: int, part_size: int, count: int) -> None:
    plan = plan_parts(size, default_part)
    assert (plan.part_size, plan.count) == (part_size, count)
    lengths = [end - start for start, end in plan.ranges()]
    assert len(lengths) == count and sum(lengths) == size
    assert set(lengths[:-1]) <= {part_size} and lengths[-1] <= part_size


def test_results_come_in_order_and_bounded() -> None:
    first_may_end = threading.Event()
    started = []

    def job(i: int) -> int:
        started.append(i)
        if i == 0:
            assert first_may_end.wait(30)
        return i

    def jobs():
        for i in range(10):
            if i == 3:  # asked for only when the window of 3 is full, with job 0 still running
                assert 3 not in started
                first_may_end.set()
            yield lambda i=i: job(i)

    assert list(in_order(jobs(), limit=3)) == list(range(10))


def test_first_error_arrives_and_later_jobs_never_start() -> None:
    started = []

    def job(i: int) -> None:
        started.append(i)
        if i == 1:
            raise ValueError("job 1")

    with pytest.raises(ValueError, match="job 1"):
        list(in_order((lambda i=i: job(i) for i in range(100)), limit=2))
    assert max(started) < 5
