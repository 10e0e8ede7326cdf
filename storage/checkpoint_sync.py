"""Copies of growing folders (training checkpoints) in a store, so that another machine can go on with the work."""

from pathlib import Path

from pydantic import BaseModel

from storage.filesystem import list_folder, open_store
from storage.manifest import FileEntry, hash_files, list_files
from storage.progress import Progress, no_progress
from storage.transfer import download_folder, upload_folder

_INDEX_NAME = "SYNCED.json"


class _Index(BaseModel):
    """What a copy holds; written after its files, so that a download is of one complete state and can be verified."""

    marker: str
    files: list[FileEntry]

    def batches(self) -> tuple[list[FileEntry], list[FileEntry]]:
        """Files to copy first, and the markers, which say that what lies beside them is complete."""
        markers = [entry for entry in self.files if entry.name.rsplit("/", 1)[-1] == self.marker]
        return [entry for entry in self.files if entry not in markers], markers


def push(local: Path, uri: str, endpoint_url: str | None, marker: str, progress: Progress = no_progress) -> None:
    """Makes the copy at `uri` equal to `local`: new files, those named `marker`, the index, then deletions."""
    index = _Index(marker=marker, files=hash_files(local, list_files(local), progress))
    for batch in index.batches():
        upload_folder(local, uri, endpoint_url, batch, progress=progress)
    fs, root = open_store(uri, endpoint_url)
    fs.pipe_file(f"{root}/{_INDEX_NAME}", index.model_dump_json().encode())
    for name in list_folder(fs, root).keys() - {entry.name for entry in index.files} - {_INDEX_NAME}:
        fs.rm_file(f"{root}/{name}")


def pull(local: Path, uri: str, endpoint_url: str | None, progress: Progress = no_progress) -> bool:
    """Copies into `local` what `push` put at `uri` or at folders below it, markers last; False if that is nothing."""
    fs, root = open_store(uri, endpoint_url)
    found = [name for name in list_folder(fs, root) if name.rsplit("/", 1)[-1] == _INDEX_NAME]
    for name in found:
        index = _Index.model_validate_json(fs.cat_file(f"{root}/{name}"))
        folder = name.removesuffix(_INDEX_NAME).rstrip("/")
        for batch in index.batches():
            download_folder(f"{uri}/{folder}", endpoint_url, local / folder, batch, progress=progress)
    return bool(found)
