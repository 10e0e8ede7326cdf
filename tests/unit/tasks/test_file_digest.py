"""Digests follow the contents of a file, and large files are read once."""

import hashlib
import json
import os
from pathlib import Path

import pytest

import tasks.file_digest as file_digest

LARGE = 2**20


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/miles/file-digests.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []
    original = file_digest.sha256_file

    def recorded(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(file_digest, "sha256_file", recorded)
    return names


def write(path: Path, content: bytes, age: float = 60.0) -> Path:
    """A file last written `age` seconds ago."""
    path.write_bytes(content)
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


def test_digests_are_sha256_by_name(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", b"a"), write(tmp_path / "b", b"b" * LARGE)]
    assert file_digest.file_digests(paths) == {
        "a": hashlib.sha256(b"a").hexdigest(),
        "b": hashlib.sha256(b"b" * LARGE).hexdigest(),
    }


def test_large_unchanged_file_is_read_once(tmp_path: Path, reads: list[str]) -> None:
    paths = [write(tmp_path / "small", b"a"), write(tmp_path / "large", b"a" * LARGE)]
    assert file_digest.file_digests(paths) == file_digest.file_digests(paths)
    assert reads == ["small", "large", "small"]


def test_changed_file_of_equal_size_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "large", b"a" * LARGE, age=60)
    before = file_digest.file_digests([path])
    write(path, b"b" * LARGE, age=30)
    assert file_digest.file_digests([path]) != before


def test_file_written_just_now_is_not_remembered(tmp_path: Path, reads: list[str]) -> None:
    path = write(tmp_path / "large", b"a" * LARGE, age=0)
    file_digest.file_digests([path])
    file_digest.file_digests([path])
    assert reads == ["large", "large"]


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_damaged_memory_is_no_more_than_forgetting(tmp_path: Path, memory: Path, damage: str) -> None:
    path = write(tmp_path / "large", b"a" * LARGE)
    digests = file_digest.file_digests([path])
    memory.write_text(damage)
    assert file_digest.file_digests([path]) == digests
    assert json.loads(memory.read_text()).keys() == {str(path)}
