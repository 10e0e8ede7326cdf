"""Work on tensors one after the other with little memory: threads run ahead, results come in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the bytes in all, and the tensor at hand."""


def no_progress(done: int, total: int, name: str) -> None:
    """The progress callback that does nothing."""


def run_ahead(
    jobs: Iterable[tuple[int, Callable[[], T]]], *, workers: int | None = None, max_bytes: int = 32 << 20
) -> Iterator[T]:
    """Results of jobs in their order, computed in threads ahead of the consumer (torch and file I/O drop the GIL).

    Args:
        jobs: bytes that a result occupies, and the function that makes it.
        workers: threads; None takes one a CPU, at most 4, where a single writer is the bottleneck.
        max_bytes: limit on the results that wait; one larger result waits alone.
    """
    pool = ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1))
    waiting: deque[tuple[int, Future[T]]] = deque()
    held = 0
    try:
        for nbytes, job in jobs:
            while waiting and held + nbytes > max_bytes:
                held -= waiting[0][0]
                yield waiting.popleft()[1].result()
            waiting.append((nbytes, pool.submit(job)))
            held += nbytes
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)
