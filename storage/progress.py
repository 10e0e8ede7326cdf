"""How long operations report progress."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is being worked on)."""


def no_progress(done: int, total: int, what: str) -> None:
    """Reports nothing."""
