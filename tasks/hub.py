"""Models from the Hugging Face Hub: a pinned commit, every listed file checked, nothing but data files."""

import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.manifest import sha256_file
from storage.progress import Progress, no_progress

SCHEME = "hf://"
# No pickles, and no Python files: loading either runs code of whoever made the model.
_WANTED = ("model*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(ValueError):
    """A model that is not to be had from the Hub as configured."""


@dataclass(frozen=True)
class HubFile:
    """A file as the Hub lists it. Large files have a sha256, small ones git's sha1."""

    name: str
    size: int | None
    sha256: str | None
    git_sha1: str | None

    def matches(self, path: Path) -> bool:
        """Whether the file at `path` has the listed size and checksum."""
        if not path.is_file() or (self.size is not None and path.stat().st_size != self.size):
            return False
        if self.sha256 is not None:
            return sha256_file(path) == self.sha256
        return self.git_sha1 is None or _git_sha1(path) == self.git_sha1


def is_wanted(name: str) -> bool:
    """Whether a file of a model repository or folder belongs to the model: weights, configuration, tokenizer."""
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in _WANTED)


def resolve_commit(repo: str, revision: str | None) -> str:
    """The commit that `revision` (None: the default branch) names now; offline, in the local cache.

    Raises:
        HubError: no such repository or revision, or no access to it.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants

    with _explained(repo, revision):
        if constants.HF_HUB_OFFLINE:
            return _cached_snapshot(repo, revision, ["config.json"]).name
        commit = HfApi().model_info(repo, revision=revision).sha
    if commit is None:
        raise HubError(f"{SCHEME}{repo} has no commit for model.revision {revision!r}")
    return commit


def fetch_snapshot(repo: str, commit: str, out: Path, progress: Progress = no_progress) -> dict[str, Any]:
    """Puts the model's files at `commit` into `out`, through the Hub's local cache, and returns the account of them.

    A file of the cache that is damaged is fetched again; with HF_HUB_OFFLINE=1 it is an error.

    Raises:
        HubError: as `resolve_commit`; or a file's checksum is wrong although it was fetched anew.
    """
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if progress is no_progress:
        disable_progress_bars()
    refetched = []
    with _explained(repo, commit):
        if constants.HF_HUB_OFFLINE:
            snapshot = _cached_snapshot(repo, commit, list(_WANTED))
            files, left_out = _cached_files(snapshot), []
        else:
            listed = _list_files(repo, commit)
            files = [file for file in listed if is_wanted(file.name)]
            left_out = sorted(file.name for file in listed if not is_wanted(file.name))
            snapshot = Path(snapshot_download(repo, revision=commit, allow_patterns=[file.name for file in files]))
        done, total = 0, sum(file.size or 0 for file in files)
        for file in files:
            path = snapshot / file.name
            if not file.matches(path):
                if constants.HF_HUB_OFFLINE:
                    raise HubError(f"{path} in the Hub's cache is damaged; unset HF_HUB_OFFLINE to fetch it again")
                path = Path(hf_hub_download(repo, file.name, revision=commit, force_download=True))
                if not file.matches(path):
                    raise HubError(
                        f"{file.name} of {SCHEME}{repo} at {commit} does not have the checksum that is listed"
                    )
                refetched.append(file.name)
            _place(path, out / file.name)
            done += file.size or 0
            progress(done, total, f"verify {file.name}")
    return {
        "source": f"{SCHEME}{repo}",
        "commit": commit,
        "files": len(files),
        "refetched": refetched,
        "left_out": left_out,
    }


def _list_files(repo: str, commit: str) -> list[HubFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(repo, revision=commit, recursive=True)
    return [
        HubFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    ]


def _cached_snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"], local_files_only=True
    )
    return Path(found)


def _cached_files(snapshot: Path) -> list[HubFile]:
    """Offline there is no listing, but the cache names its blobs by their checksum."""
    files = []
    for path in sorted(snapshot.iterdir()):
        if is_wanted(path.name):
            blob = path.resolve().name
            sha256 = blob if re.fullmatch(r"[0-9a-f]{64}", blob) else None
            git_sha1 = blob if re.fullmatch(r"[0-9a-f]{40}", blob) else None
            files.append(HubFile(path.name, None, sha256, git_sha1))
    return files


def _git_sha1(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _place(source: Path, target: Path) -> None:
    # Blobs of the cache are never written to again, so a second name for the same bytes is safe.
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turns refusals of the Hub into one message that names the option; what may pass by itself is left as it is."""
    from huggingface_hub import errors

    what = f"{SCHEME}{repo}" + (f" at revision {revision}" if revision else "")
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(f"{what} is gated: accept its terms on the Hub and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what} does not exist; change model.revision") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{what} does not exist or is private; change model.path or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        if error.__cause__ is not None:  # the Hub was asked and did not answer
            raise
        raise HubError(f"{what} is not complete in the Hub's local cache; unset HF_HUB_OFFLINE to fetch it") from error
