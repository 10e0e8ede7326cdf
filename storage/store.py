"""ArtifactStore: finished artifacts at `{uri}/{kind}/{key}/`, each with a manifest that was written last."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from storage.checkpoint_sync import pull, push
from storage.filesystem import is_local, open_store, sizes_in
from storage.lock import stage_lock
from storage.manifest import (
    MANIFEST_NAME,
    ArtifactRef,
    Manifest,
    check_sums,
    hash_files,
    list_files,
    read_manifest,
    recorded_versions,
    sha256_file,
    size_faults,
    write_manifest,
)
from storage.parts import in_order
from storage.progress import Progress, no_progress
from storage.retry import StoreError
from storage.transfer import download_folder, remote_sha256, upload_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ArtifactEntry:
    """One folder of a store, finished or not."""

    kind: str
    key: str
    uri: str
    size: int  # bytes
    files: int
    created: str | None  # UTC, ISO 8601; None if unfinished
    complete: bool
    stage: str | None


class ArtifactStore:
    """Artifacts in a local folder or in any fsspec file system.

    A local store is worked on in place. For a remote one, stages write to and read from a scratch folder of this
    machine, which also keeps what was fetched.

    Args:
        uri: local path or fsspec URI.
        endpoint_url: of an S3-compatible server.
        scratch: local folder for a remote store; None takes one under $XDG_CACHE_HOME that belongs to `uri`.
    """

    def __init__(self, uri: str, endpoint_url: str | None = None, scratch: Path | None = None) -> None:
        self._fs, self._root = open_store(uri, endpoint_url)
        self._endpoint_url = endpoint_url
        self.is_local = is_local(self._fs)
        self.uri = self._root if self.is_local else uri.rstrip("/")
        if self.is_local:
            self._work = Path(self._root)
        elif scratch is not None:
            self._work = scratch.absolute()
        else:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            self._work = cache / "miles" / hashlib.sha256(f"{endpoint_url} {self.uri}".encode()).hexdigest()[:16]

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """The artifact, if its manifest is there and all files are, with the right sizes."""
        manifest = self._read(kind, key)
        if manifest is None or size_faults(manifest, sizes_in(self._fs, self._folder(kind, key))):
            return None
        return self._ref(manifest)

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest of `ref`.

        Raises:
            StoreError: it is not in this store, or its contents are not those that `ref` was made for.
        """
        manifest = self._read(ref.kind, ref.key)
        if manifest is None:
            raise StoreError(f"no finished artifact at {self._uri(ref.kind, ref.key)}: run its stage again")
        if manifest.digest != ref.digest:
            raise StoreError(
                f"{self._uri(ref.kind, ref.key)} has digest {manifest.digest}, expected {ref.digest}: it was made anew "
                "since; run the stages that read it again"
            )
        return manifest

    def work_dir(self, kind: str, key: str) -> Path:
        """The local folder into which a stage writes the artifact before `commit`.

        What an interrupted attempt left is still there. A manifest whose files are damaged is removed, so that the
        folder counts as unfinished again.

        Raises:
            StoreError: the artifact is finished; `remove` it to make it anew.
        """
        if self.find(kind, key) is not None:
            raise StoreError(f"{self._uri(kind, key)} is finished; use it, or remove it first to make it anew")
        folder = self._work / kind / key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        return folder

    def commit(
        self,
        kind: str,
        key: str,
        *,
        stage: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        config: Mapping[str, Any],
        account: Mapping[str, Any],
        volatile: Sequence[str] = (),
        progress: Progress = no_progress,
    ) -> ArtifactRef:
        """Finishes what was written to `work_dir`: hashes it, uploads it where the store is remote, manifest last.

        Args:
            inputs: name of each input artifact -> its digest.
            outputs: name -> path, relative to the artifact, of files or folders that later stages look for.
            config: the part of the configuration that the stage read.
            account: what came in, was used, was dropped.
            volatile: patterns (`logs/*`; * also crosses slashes) of files that may differ between equal runs.

        Raises:
            StoreError: nothing was written, an output is missing, or a file changed meanwhile.
        """
        folder = self._work / kind / key
        names = list_files(folder) if folder.is_dir() else []
        missing = [path for path in outputs.values() if not (folder / path).exists()]
        if not names or missing:
            found = f"outputs {missing} are missing" if names else "nothing was written"
            raise StoreError(f"{stage} can not finish {self._uri(kind, key)}: {found} in {str(folder)!r}")
        entries = [
            entry.model_copy(update={"volatile": any(fnmatch(entry.name, pattern) for pattern in volatile)})
            for entry in hash_files(folder, names, progress)
        ]
        manifest = Manifest(
            kind=kind,
            key=key,
            stage=stage,
            files=tuple(entries),
            inputs=dict(inputs),
            outputs=dict(outputs),
            config=dict(config),
            versions=recorded_versions(),
            account=dict(account),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if not self.is_local:
            self._upload(manifest, folder, progress)
        write_manifest(*open_store(str(folder)), manifest)
        return self._ref(manifest)

    def _upload(self, manifest: Manifest, folder: Path, progress: Progress) -> None:
        remote = self._folder(manifest.kind, manifest.key)
        uri = self._uri(manifest.kind, manifest.key)
        upload_folder(folder, uri, self._endpoint_url, manifest.files, progress=progress)
        known = {entry.name for entry in manifest.files}
        for name in sizes_in(self._fs, remote).keys() - known:  # of an earlier attempt, e.g. pushed checkpoints
            self._fs.rm_file(f"{remote}/{name}")
        write_manifest(self._fs, remote, manifest)

    def fetch(self, ref: ArtifactRef, verify: bool = False, progress: Progress = no_progress) -> Path:
        """A local folder with the artifact: its own in a local store, else a verified copy, which is kept for reuse.

        Args:
            verify: also check the sha256 of files that were not downloaded just now.

        Raises:
            StoreError: missing, made anew since `ref`, or damaged.
        """
        manifest = self.manifest(ref)
        folder = self._work / ref.kind / ref.key
        if self.is_local:
            faults = size_faults(manifest, sizes_in(self._fs, str(folder)))
            if faults:
                raise StoreError(f"{str(folder)!r} is damaged: {faults}; remove it and run its stage again")
        else:
            with stage_lock(self._lock_path(ref.kind, ref.key, "fetch")):
                self._download(manifest, folder, progress)
        if verify:
            check_sums(manifest, [sha256_file(folder / entry.name) for entry in manifest.files], str(folder))
        return folder

    def _download(self, manifest: Manifest, folder: Path, progress: Progress) -> None:
        local_fs, local_root = open_store(str(folder))
        held = read_manifest(local_fs, local_root)
        if held is not None and held == manifest and not size_faults(manifest, sizes_in(local_fs, local_root)):
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        uri = self._uri(manifest.kind, manifest.key)
        download_folder(uri, self._endpoint_url, folder, manifest.files, progress=progress)
        for name in set(list_files(folder)) - {entry.name for entry in manifest.files}:  # of an unfinished attempt
            (folder / name).unlink()
        write_manifest(local_fs, local_root, manifest)

    def verify(self, ref: ArtifactRef, progress: Progress = no_progress) -> None:
        """Reads every file in the store and compares its sha256 with the manifest.

        Raises:
            StoreError: names the first file that differs.
        """
        manifest = self.manifest(ref)
        folder = self._folder(ref.kind, ref.key)
        faults = size_faults(manifest, sizes_in(self._fs, folder))
        if faults:
            raise StoreError(f"{self._uri(ref.kind, ref.key)} is damaged: {faults}")
        sums, done = [], 0
        jobs = (lambda e=entry: remote_sha256(self._fs, f"{folder}/{e.name}", e.size) for entry in manifest.files)
        for entry, digest in zip(manifest.files, in_order(jobs), strict=True):
            sums.append(digest)
            done += entry.size
            progress(done, manifest.size, f"verify {entry.name}")
        check_sums(manifest, sums, self._uri(ref.kind, ref.key))

    def ls(self) -> list[ArtifactEntry]:
        """All artifacts and unfinished folders of the store, sorted by kind and key."""
        folders: dict[tuple[str, str], dict[str, int]] = {}
        for name, size in sizes_in(self._fs, self._root).items():
            kind, key, rest = [*name.split("/", 2), "", ""][:3]
            if rest and not kind.startswith("."):
                folders.setdefault((kind, key), {})[rest] = size
        entries = []
        for (kind, key), sizes in sorted(folders.items()):
            manifest = self._read(kind, key) if MANIFEST_NAME in sizes else None
            sizes.pop(MANIFEST_NAME, None)
            complete = manifest is not None and not size_faults(manifest, sizes)
            created, stage = (manifest.created, manifest.stage) if manifest else (None, None)
            uri = self._uri(kind, key)
            entries.append(ArtifactEntry(kind, key, uri, sum(sizes.values()), len(sizes), created, complete, stage))
        return entries

    def remove(self, kind: str, key: str) -> None:
        """Deletes the artifact and its local copy, manifest first, so that a half-removed one counts as unfinished."""
        folder = self._folder(kind, key)
        names = sizes_in(self._fs, folder)
        for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
            self._fs.rm_file(f"{folder}/{name}")
        work = self._work / kind / key
        if work.exists():
            (work / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(work)

    def sync_up(self, kind: str, key: str, relative: str, *, marker: str, progress: Progress = no_progress) -> None:
        """Makes the store's copy of the subfolder `relative` of an unfinished artifact equal to the local one.

        Files named `marker` (which say that what lies beside them is complete) go up after all others, and what is no
        longer there locally is deleted after that, so that the copy always holds a complete state. Does nothing in a
        local store.
        """
        if not self.is_local:
            uri = f"{self._uri(kind, key)}/{relative}"
            push(self._work / kind / key / relative, uri, self._endpoint_url, marker, progress)

    def sync_down(self, kind: str, key: str, relative: str, *, progress: Progress = no_progress) -> bool:
        """Brings what `sync_up` put under `relative`, from whichever machine, into the local `work_dir`.

        Markers come last; other local files stay. Returns whether there was anything. Does nothing in a local store.
        """
        folder = self._work / kind / key / relative
        if self.is_local:
            return folder.exists()
        return pull(folder, f"{self._uri(kind, key)}/{relative}", self._endpoint_url, progress)

    def lock(self, kind: str, key: str) -> AbstractContextManager[None]:
        """Excludes other processes of this machine that make the same artifact."""
        return stage_lock(self._lock_path(kind, key, "stage"))

    def _read(self, kind: str, key: str) -> Manifest | None:
        manifest = read_manifest(self._fs, self._folder(kind, key))
        # One that came along when another artifact's folder was copied says nothing about this one.
        return manifest if manifest is not None and (manifest.kind, manifest.key) == (kind, key) else None

    def _lock_path(self, kind: str, key: str, purpose: str) -> Path:
        self._folder(kind, key)
        return self._work / ".locks" / f"{kind}-{key}.{purpose}"

    def _folder(self, kind: str, key: str) -> str:
        for name in (kind, key):
            if not _NAME.fullmatch(name):
                raise StoreError(f"{name!r} can not name an artifact: it must match {_NAME.pattern}")
        return f"{self._root}/{kind}/{key}"

    def _uri(self, kind: str, key: str) -> str:
        return f"{self.uri}/{kind}/{key}"

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        uri = self._uri(manifest.kind, manifest.key)
        return ArtifactRef(uri=uri, kind=manifest.kind, key=manifest.key, digest=manifest.digest)
