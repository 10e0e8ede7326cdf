"""Which failures a stage is tried again after."""

from typing import Any

from storage.retry import StoreError, is_transient


def passes_by_itself(error: BaseException) -> bool:
    """Whether trying again may help: storage and network faults may pass, faults of configuration or data never do."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StoreError):
            return False
        # huggingface_hub brings its own copy of httpx under another name, so its classes are told by name.
        if any(base.__name__ == "TransportError" for base in type(cause).__mro__):
            return True
        cause = cause.__cause__
    return is_transient(error)


def retry_condition(task: Any, task_run: Any, state: Any) -> bool:
    """`passes_by_itself` in the form that Prefect calls."""
    try:
        state.result()
    except Exception as error:
        return passes_by_itself(error)
    return False
