"""A lock between processes of one machine."""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def stage_lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, waiting for as long as another process or thread has it.

    It is the kernel's flock: it goes with its holder, however that dies, so there is no stale lock to clean up. The
    file itself stays (removing it would let two holders in, one on the removed file) and names its holder, whom a
    waiter reports as a warning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            logger.warning("waiting for %s, held by %s", path, file.read().strip() or "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        file.write(json.dumps(holder))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # closing the file releases the lock
