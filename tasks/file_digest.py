"""Digests of files that a configuration names, so that a changed file is another input. Large ones are remembered."""

import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from storage.manifest import sha256_file

_REMEMBERED_FROM_BYTES = 2**20
# A file written twice within one tick of its file system's clock looks unchanged: do not trust the newest.
_SETTLED_SECONDS = 2.0


def file_digests(paths: Iterable[Path]) -> dict[str, str]:
    """Name -> sha256 of each file. Files from 1 MiB on are read again only when their size or time changed.

    The memory is one file under $XDG_CACHE_HOME (~/.cache); without it everything is read, no more.
    """
    memory_file = _memory_file()
    memory = _load(memory_file)
    known = dict(memory)
    digests = {}
    for path in paths:
        stat = path.stat()
        name, identity = str(path.absolute()), [stat.st_size, stat.st_mtime_ns]
        digest = memory[name][-1] if memory.get(name, [])[:-1] == identity else sha256_file(path)
        if stat.st_size >= _REMEMBERED_FROM_BYTES and time.time() - stat.st_mtime > _SETTLED_SECONDS:
            memory[name] = [*identity, digest]
        digests[path.name] = digest
    if memory != known:
        _save(memory_file, memory)
    return digests


def _memory_file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "miles" / "file-digests.json"


def _load(path: Path) -> dict[str, list]:  # [size, mtime in ns, digest]
    try:
        memory = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _save(path: Path, memory: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(memory, file)
    os.replace(file.name, path)
