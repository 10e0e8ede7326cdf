"""Progress bars for whatever takes longer than two seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from storage.progress import Progress as ProgressCallback
from storage.progress import no_progress

_SHOWN_AFTER_SECONDS = 2.0

_shown: ContextVar[bool] = ContextVar("progress_shown", default=False)


@contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[None]:
    """While entered, `stage_progress` draws on the terminal, unless `quiet`. Outside of it (a worker) it is silent."""
    token = _shown.set(not quiet)
    try:
        yield
    finally:
        _shown.reset(token)


@contextmanager
def stage_progress(stage: str) -> Iterator[ProgressCallback]:
    """The progress callback of one stage: a bar on stderr from the moment that the stage has run for two seconds."""
    if not _shown.get():
        yield no_progress
        return
    bar = Progress(
        TextColumn("{task.fields[stage]:<9}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )
    begin, row = time.monotonic(), None

    def report(done: int, total: int, what: str) -> None:
        nonlocal row
        if row is None and time.monotonic() - begin >= _SHOWN_AFTER_SECONDS:
            bar.start()
            row = bar.add_task("", stage=stage, what="")
        if row is not None:
            bar.update(TaskID(row), completed=done, total=total, what=what)

    try:
        yield report
    finally:
        if row is not None:
            bar.stop()
