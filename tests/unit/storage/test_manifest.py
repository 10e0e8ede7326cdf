import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from storage.filesystem import open_store
from storage.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    hash_files,
    list_files,
    read_manifest,
    size_faults,
    write_manifest,
)
from storage.retry import StoreError

A = FileEntry(name="a", size=1, sha256="1" * 64)
B = FileEntry(name="b", size=2, sha256="2" * 64)
LOG = FileEntry(name="log", size=3, sha256="3" * 64, volatile=True)


def manifest(*files: FileEntry, **changes) -> Manifest:
    fields: dict[str, Any] = {"kind": "hf", "key": "k", "stage": "s", "created": "now", "files": files}
    empty: dict[str, Any] = {"inputs": {}, "outputs": {}, "config": {}, "versions": {}, "account": {}}
    return Manifest(**{**fields, **empty, **changes})


def test_digest_by_hand() -> None:
    text = f'["hf", [["a", 1, "{"1" * 64}"], ["b", 2, "{"2" * 64}"]]]'
    assert manifest(B, LOG, A).digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (manifest(B, A, key="other", stage="other", created="later", config={"x": 1}, account={"n": 2}), True),
        (manifest(A, B, LOG), True),
        (manifest(A, B, LOG.model_copy(update={"sha256": "4" * 64})), True),
        (manifest(A), False),
        (manifest(A, B, kind="torch_dist"), False),
        (manifest(A, B.model_copy(update={"size": 3})), False),
        (manifest(A, B.model_copy(update={"sha256": "4" * 64})), False),
        (manifest(A, B.model_copy(update={"name": "c"})), False),
    ],
)
def test_digest_is_of_contents_alone(other: Manifest, equal: bool) -> None:
    assert (other.digest == manifest(A, B).digest) is equal


def test_round_trip_and_unreadable(target) -> None:
    fs, root = open_store(target.uri, target.endpoint_url)
    assert read_manifest(fs, root) is None
    if target.endpoint_url is None:
        fs.makedirs(root, exist_ok=True)
    write_manifest(fs, root, manifest(A, LOG))
    assert read_manifest(fs, root) == manifest(A, LOG)
    fs.pipe_file(f"{root}/{MANIFEST_NAME}", b'{"kind": "hf", "fi')
    assert read_manifest(fs, root) is None


def test_failed_write_keeps_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, root = open_store(str(tmp_path))
    write_manifest(fs, root, manifest(A))

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_manifest(fs, root, manifest(A, B))
    assert read_manifest(fs, root) == manifest(A)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_files_and_hashes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, data in {"z": b"", "sub/a": b"abc", MANIFEST_NAME: b"{}", MANIFEST_NAME + ".x1": b"{"}.items():
        (tmp_path / name).write_bytes(data)
    assert list_files(tmp_path) == ["sub/a", "z"]
    steps = []
    entries = hash_files(tmp_path, ["sub/a", "z"], lambda *step: steps.append(step))
    assert json.loads(json.dumps([entry.sha256[:8] for entry in entries])) == ["ba7816bf", "e3b0c442"]
    assert steps == [(3, 3, "checksum sub/a"), (3, 3, "checksum z")]


@pytest.mark.parametrize("target_is_folder", [False, True])
def test_links_are_refused(target_is_folder: bool, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir() if target_is_folder else outside.write_text("x")
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "link").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        list_files(tmp_path / "artifact")


def test_size_faults_name_files() -> None:
    assert size_faults(manifest(A, B), {"a": 1, "b": 2, "extra": 9}) == ""
    assert size_faults(manifest(A, B), {"b": 5}) == "a (missing, expected 1 bytes), b (5, expected 2 bytes)"
