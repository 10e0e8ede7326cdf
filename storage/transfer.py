"""Verified, resumable copies between a local folder and any store, in bounded memory.

Both directions are one ordered stream of parts over all files, of which a few are under way at a time: one large file
and many small ones are equally parallel, memory is bounded by the parts in flight, and checksums are computed in
passing.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsspec.spec import AbstractFileSystem

from storage.filesystem import is_s3, list_folder, open_store
from storage.manifest import FileEntry, sha256_file
from storage.parts import PartPlan, in_order, plan_parts
from storage.progress import Progress, no_progress
from storage.retry import StoreError, with_retries
from storage.s3_upload import S3Upload, expected_etag, md5

_PARTIAL = ".partial"


@dataclass(frozen=True)
class TransferReport:
    """Account of a transfer: every file was moved, or was there already; all are verified."""

    files: int
    bytes: int
    moved_files: int
    moved_bytes: int

    @property
    def skipped_files(self) -> int:
        """Files that were already there with the right checksum."""
        return self.files - self.moved_files


def upload_folder(
    local: Path,
    uri: str,
    endpoint_url: str | None,
    files: Sequence[FileEntry],
    *,
    part_size: int | None = None,
    progress: Progress = no_progress,
) -> TransferReport:
    """Copies `files` of `local` to `uri`; those already there with the same contents are skipped.

    The keys are `{uri}/{name}`, whether or not the target exists or `uri` ends in a slash.

    Args:
        part_size: bytes of a part of a multipart upload; None takes the default of `plan_parts`.

    Raises:
        StoreError: a local file is missing or differs from its entry, or what arrived differs from what was sent.
    """
    _require_local(local, files)
    fs, root = open_store(uri, endpoint_url)
    plans = [plan_parts(entry.size, part_size) if part_size else plan_parts(entry.size) for entry in files]
    present = list_folder(fs, root)

    def is_there(entry: FileEntry, plan: PartPlan) -> bool:
        info = present.get(entry.name)
        if info is None or info["size"] != entry.size:
            return False
        path = f"{root}/{entry.name}"
        if is_s3(fs):
            part_md5s = [md5(data) for data in _local_parts(local / entry.name, plan)]
            if info["ETag"].strip('"') == expected_etag(part_md5s):
                return sha256_file(local / entry.name) == entry.sha256
        return remote_sha256(fs, path, entry.size) == entry.sha256

    checks = in_order(partial(is_there, entry, plan) for entry, plan in zip(files, plans, strict=True))
    todo = [(entry, plan) for entry, plan, there in zip(files, plans, checks, strict=True) if not there]
    meter = _Meter(files, [entry for entry, _ in todo], progress)
    send = _send_s3 if is_s3(fs) else _send_files
    for nbytes, name in send(fs, root, local, todo):
        meter.add(nbytes, name)
    return meter.report()


def download_folder(
    uri: str,
    endpoint_url: str | None,
    local: Path,
    files: Sequence[FileEntry],
    *,
    progress: Progress = no_progress,
) -> TransferReport:
    """Copies `files` from `uri` to `local`. Files already there with the same contents are skipped, and one cut short
    by an interruption goes on where it stopped. A file has its name only once its checksum was right.

    Raises:
        StoreError: files are missing or of another size in the store (all named, before the first byte), or a file's
            checksum is wrong twice.
    """
    fs, root = open_store(uri, endpoint_url)

    def is_there(entry: FileEntry) -> bool:
        path = local / entry.name
        return path.is_file() and path.stat().st_size == entry.size and sha256_file(path) == entry.sha256

    checks = in_order(partial(is_there, entry) for entry in files)
    todo = [entry for entry, there in zip(files, checks, strict=True) if not there]
    if todo:
        _require_remote(uri, list_folder(fs, root), todo)
    meter = _Meter(files, todo, progress)
    for _ in range(2):  # once more for files damaged on the way or on disk, from the start
        todo = _receive(fs, root, local, todo, meter)
    if todo:
        raise StoreError(f"{uri}/{todo[0].name} is damaged: its sha256 is not {todo[0].sha256}, as its manifest says")
    return meter.report()


def remote_sha256(fs: AbstractFileSystem, path: str, size: int) -> str:
    """Hex digest of an object of `size` bytes, read part by part."""
    digest = hashlib.sha256()
    for start, end in plan_parts(size).ranges():
        digest.update(_read(fs, path, start, end))
    return digest.hexdigest()


def _read(fs: AbstractFileSystem, path: str, start: int, end: int) -> bytes:
    if start == end:  # an empty object has no range to ask for
        return with_retries(lambda: fs.cat_file(path), f"read {path}")
    return with_retries(lambda: fs.cat_file(path, start=start, end=end), f"read {path}")


def _local_part(path: Path, start: int, end: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


def _local_parts(path: Path, plan: PartPlan) -> Iterator[bytes]:
    return (_local_part(path, start, end) for start, end in plan.ranges())


def _require_local(local: Path, files: Sequence[FileEntry]) -> None:
    faults = []
    for entry in files:
        path = local / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size:
            faults.append(f"{entry.name} ({'missing' if size is None else size}, expected {entry.size} bytes)")
    if faults:
        raise StoreError(f"{str(local)!r} is not what its manifest says: {', '.join(faults)}")


def _require_remote(uri: str, present: dict[str, dict], files: Sequence[FileEntry]) -> None:
    sizes = {name: info["size"] for name, info in present.items()}
    faults = [
        f"{entry.name} ({sizes.get(entry.name, 'missing')}, expected {entry.size} bytes)"
        for entry in files
        if sizes.get(entry.name) != entry.size
    ]
    if faults:
        raise StoreError(f"{uri!r} is not what its manifest says: {', '.join(faults)}")


class _Meter:
    """Counts bytes for the progress callback and the report."""

    def __init__(self, files: Sequence[FileEntry], moving: Sequence[FileEntry], progress: Progress) -> None:
        self._files, self._moving, self._progress = files, moving, progress
        self._total = sum(entry.size for entry in files)
        self._done = self._total - sum(entry.size for entry in moving)

    def add(self, nbytes: int, name: str) -> None:
        self._done += nbytes
        self._progress(self._done, self._total, name)

    def report(self) -> TransferReport:
        moved = sum(entry.size for entry in self._moving)
        return TransferReport(len(self._files), self._total, len(self._moving), moved)


def _send_files(
    fs: AbstractFileSystem, root: str, local: Path, todo: Sequence[tuple[FileEntry, PartPlan]]
) -> Iterator[tuple[int, str]]:
    """Any file system: put each file, then read it back."""

    def send(entry: FileEntry) -> tuple[int, str]:
        path = f"{root}/{entry.name}"
        with_retries(lambda: fs.put_file(str(local / entry.name), path), f"write {path}")
        _check(entry, remote_sha256(fs, path, entry.size), path)
        return entry.size, entry.name

    return in_order(partial(send, entry) for entry, _ in todo)


def _send_s3(
    fs: AbstractFileSystem, root: str, local: Path, todo: Sequence[tuple[FileEntry, PartPlan]]
) -> Iterator[tuple[int, str]]:
    """S3: parts of all files in one stream; the ETag proves the contents, or a read where it can not."""
    uploads: dict[str, S3Upload] = {}

    def send(upload: S3Upload, path: Path, number: int, start: int, end: int) -> tuple[bytes, bytes]:
        data = _local_part(path, start, end)
        digest = md5(data)
        upload.send(number, data, digest)
        return data, digest

    def jobs() -> Iterator[Callable[[], tuple[bytes, bytes]]]:
        for entry, plan in todo:
            upload = uploads[entry.name] = S3Upload(fs, f"{root}/{entry.name}", plan)
            for number, (start, end) in enumerate(plan.ranges(), 1):
                yield partial(send, upload, local / entry.name, number, start, end)

    sent = in_order(jobs())
    try:
        for entry, plan in todo:
            path, sha256, part_md5s = f"{root}/{entry.name}", hashlib.sha256(), []
            for _ in range(plan.count):
                data, digest = next(sent)
                sha256.update(data)
                part_md5s.append(digest)
                yield len(data), entry.name
            _check(entry, sha256.hexdigest(), str(local / entry.name))
            etag = uploads.pop(entry.name).finish()
            if etag != expected_etag(part_md5s):
                _check(entry, remote_sha256(fs, path, entry.size), path)
    finally:
        sent.close()  # waits for parts in flight before their upload is aborted
        for upload in uploads.values():
            upload.abort()


def _check(entry: FileEntry, sha256: str, path: str) -> None:
    if sha256 != entry.sha256:
        raise StoreError(f"{path} has sha256 {sha256}, its manifest says {entry.sha256}: it is damaged or was changed")


def _receive(
    fs: AbstractFileSystem, root: str, local: Path, todo: Sequence[FileEntry], meter: _Meter
) -> list[FileEntry]:
    """Downloads `todo`; returns the entries whose checksum came out wrong (their bytes are removed)."""
    plans = [plan_parts(entry.size) for entry in todo]
    starts = [_resume_at(local / (entry.name + _PARTIAL), plan) for entry, plan in zip(todo, plans, strict=True)]

    def jobs() -> Iterator[Callable[[], bytes]]:
        for entry, plan, resume in zip(todo, plans, starts, strict=True):
            yield from (partial(_read, fs, f"{root}/{entry.name}", s, e) for s, e in plan.ranges() if s >= resume)

    received = in_order(jobs())
    damaged = []
    for entry, plan, resume in zip(todo, plans, starts, strict=True):
        path = local / entry.name
        partial_path = local / (entry.name + _PARTIAL)
        partial_path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial_path, "a+b") as file:
            file.truncate(resume)
            file.seek(0)
            sha256 = hashlib.sha256()
            while block := file.read(2**20):
                sha256.update(block)
            if resume:
                meter.add(resume, entry.name)
            for start, _ in plan.ranges():
                if start >= resume:
                    data = next(received)
                    file.write(data)
                    sha256.update(data)
                    meter.add(len(data), entry.name)
        if sha256.hexdigest() == entry.sha256:
            os.replace(partial_path, path)
        else:
            partial_path.unlink()
            meter.add(-entry.size, entry.name)
            damaged.append(entry)
    return damaged


def _resume_at(partial_path: Path, plan: PartPlan) -> int:
    """Bytes of whole parts that an interrupted download left."""
    size = partial_path.stat().st_size if partial_path.exists() else 0
    return size // plan.part_size * plan.part_size if size < plan.size else 0
