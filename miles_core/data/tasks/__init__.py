"""Generated tasks by name."""

from collections.abc import Callable

from miles_core.config.data import TaskConfig
from miles_core.config.faults import nearest
from miles_core.data.rows import DataError
from miles_core.data.tasks.reasoning_gym import PREFIX, ReasoningGymTask
from miles_core.data.tasks.sort_digits import SortDigits
from miles_core.data.tasks.task import Split, Task

__all__ = ["Split", "Task", "build_task"]

TASKS: dict[str, Callable[[TaskConfig], Task]] = {"sort_digits": SortDigits}


def build_task(config: TaskConfig) -> Task:
    """The task that `data.task` describes. Raises `DataError` for an unknown name or wrong parameters."""
    if config.name.startswith(PREFIX):
        return ReasoningGymTask(config)
    if config.name not in TASKS:
        known = [*TASKS, f"{PREFIX}NAME"]
        raise DataError(
            [f"data.task.name {config.name!r} must be one of {', '.join(known)}{nearest(config.name, known)}"]
        )
    return TASKS[config.name](config)
