"""Manifest: what an artifact holds and where it came from. It is written last, so its presence means "complete"."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from storage.filesystem import is_local
from storage.progress import Progress, no_progress
from storage.retry import StoreError

MANIFEST_NAME = "MANIFEST.json"
_RECORDED_PACKAGES = ("miles-on-prefect", "torch", "transformers", "megatron-core", "safetensors", "ray", "prefect")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Frozen):
    """One file of an artifact."""

    name: str  # relative to the artifact, with forward slashes
    size: int  # bytes
    sha256: str
    volatile: bool = False  # logs, times: verified, but no part of the artifact's digest

    @field_validator("name")
    @classmethod
    def _stays_inside(cls, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"file name {name!r} leaves its artifact")
        return name


class ArtifactRef(_Frozen):
    """What a stage hands to the next: where an artifact is, and the digest of its contents."""

    uri: str
    kind: str
    key: str
    digest: str


class Manifest(_Frozen):
    """The record of a finished artifact."""

    kind: str
    key: str
    stage: str
    files: tuple[FileEntry, ...]
    inputs: dict[str, str]  # name of an input -> its digest
    outputs: dict[str, str]  # name -> path of a notable file or folder in the artifact
    config: dict[str, Any]  # the part of the configuration that the stage read
    versions: dict[str, str]  # package -> version
    account: dict[str, Any]  # what came in, was used, was dropped
    created: str  # UTC, ISO 8601

    @property
    def digest(self) -> str:
        """sha256 over kind and non-volatile files alone: a re-run that makes equal files has an equal digest."""
        files = sorted([f.name, f.size, f.sha256] for f in self.files if not f.volatile)
        return hashlib.sha256(json.dumps([self.kind, files]).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


def size_faults(manifest: Manifest, sizes: Mapping[str, int]) -> str:
    """Files of `manifest` that are missing or of another size among `sizes` (name -> bytes); "" if all are right."""
    return ", ".join(
        f"{entry.name} ({sizes.get(entry.name, 'missing')}, expected {entry.size} bytes)"
        for entry in manifest.files
        if sizes.get(entry.name) != entry.size
    )


def check_sums(manifest: Manifest, sums: Sequence[str], where: str) -> None:
    """Compares the digests of the files in `where`, in the order of the manifest.

    Raises:
        StoreError: names the files that differ.
    """
    wrong = [entry.name for entry, digest in zip(manifest.files, sums, strict=True) if digest != entry.sha256]
    if wrong:
        raise StoreError(f"{where} is damaged: the sha256 of {', '.join(wrong)} differs from the manifest's")


def recorded_versions() -> dict[str, str]:
    """Versions of the installed packages that can change an artifact."""
    found = {}
    for package in _RECORDED_PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def read_manifest(fs: AbstractFileSystem, folder: str) -> Manifest | None:
    """The manifest of `folder`; None where there is none, or one that can not be read (cut off, other version)."""
    try:
        return Manifest.model_validate_json(fs.cat_file(f"{folder}/{MANIFEST_NAME}"))
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def write_manifest(fs: AbstractFileSystem, folder: str, manifest: Manifest) -> None:
    """Writes the manifest of `folder` in one atomic step: a reader sees all of it or none."""
    path, data = f"{folder}/{MANIFEST_NAME}", manifest.model_dump_json(indent=1).encode()
    if not is_local(fs):
        fs.pipe_file(path, data)  # object stores show an object once it is whole
        return
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=f"{MANIFEST_NAME}.")
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide a shared store's manifests from other users
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def list_files(root: Path) -> list[str]:
    """Relative names of all files under `root`, sorted, the manifest (whole or half-written) left out.

    Raises:
        StoreError: a symbolic link, since its target may change or go after the artifact is finished.
    """
    names = []
    for folder, subfolders, files in os.walk(root):
        for name in [*subfolders, *files]:
            path = Path(folder, name)
            if path.is_symlink():
                raise StoreError(f"{str(path)!r} is a symbolic link; an artifact holds files only: copy it")
        names += [Path(folder, name).relative_to(root).as_posix() for name in files]
    return sorted(name for name in names if not name.startswith(MANIFEST_NAME))


def sha256_file(path: Path) -> str:
    """Hex digest of a local file, read as a stream.

    Raises:
        StoreError: the file changed meanwhile.
    """
    with open(path, "rb") as file:
        before = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.stat(path)
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise StoreError(f"{str(path)!r} changed while it was read; another process writes to this artifact")
    return digest


def hash_files(root: Path, names: Sequence[str], progress: Progress = no_progress) -> list[FileEntry]:
    """Entries of the files `names` under `root`, hashed in parallel.

    Raises:
        StoreError: a file changed meanwhile.
    """
    sizes = [(root / name).stat().st_size for name in names]
    done = 0
    entries = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(sha256_file, [root / name for name in names])
        for name, size, digest in zip(names, sizes, digests, strict=True):
            entries.append(FileEntry(name=name, size=size, sha256=digest))
            done += size
            progress(done, sum(sizes), f"checksum {name}")
    return entries
