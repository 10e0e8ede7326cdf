"""How a file is cut into parts, and how parts are worked on in parallel but taken in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
MiB = 2**20


@dataclass(frozen=True)
class PartPlan:
    """Equal parts, but for a shorter last one. An empty file is one empty part."""

    size: int  # bytes of the file
    part_size: int
    count: int

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each part, end exclusive."""
        for start in range(0, max(self.size, 1), self.part_size):
            yield start, min(start + self.part_size, self.size)


def plan_parts(size: int, default_part: int = 8 * MiB, max_parts: int = 10_000) -> PartPlan:
    """Parts of a file of `size` bytes: of `default_part` bytes, or larger where that would take more than `max_parts`.

    Planned before the first byte is sent, since S3 refuses part 10,001, and some stores refuse unequal parts.
    """
    part_size = max(default_part, -(-size // max_parts))
    return PartPlan(size, part_size, max(1, -(-size // part_size)))


def in_order(jobs: Iterable[Callable[[], T]], limit: int = 8) -> Generator[T, None, None]:
    """Results of `jobs` in their order. At most `limit` of them run or wait to be taken, which bounds memory."""
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(limit) as pool:
        try:
            for job in jobs:
                if len(pending) == limit:
                    yield pending.popleft().result()
                pending.append(pool.submit(job))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
