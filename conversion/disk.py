"""A full disk: noticed before the work starts where possible, and named precisely where not."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DiskFullError(OSError):
    """No space left; says where, and how many bytes were needed."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(errno.ENOSPC, message, str(path))


def require_free_space(folder: Path, nbytes: int) -> None:
    """Raises `DiskFullError` when `folder` (or the nearest parent that exists) has less than `nbytes` free."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise DiskFullError(f"{nbytes} bytes are needed and {free} are free", folder)


@contextmanager
def naming_full_disk(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """Turns a bare ENOSPC of the body into a `DiskFullError` that names file and bytes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not _is_full_disk(error):
            raise
        needed = f" while writing {nbytes} bytes" if nbytes else ""
        free = shutil.disk_usage(path.parent).free
        raise DiskFullError(f"the disk is full{needed} ({free} bytes are free)", path) from error


def _is_full_disk(error: BaseException | None) -> bool:
    """torch.save trips over the ENOSPC that ended it and raises a RuntimeError, so its context counts as well."""
    return error is not None and (
        (isinstance(error, OSError) and error.errno == errno.ENOSPC) or _is_full_disk(error.__context__)
    )
