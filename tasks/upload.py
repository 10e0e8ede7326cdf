"""upload: publishes the exported model.

    {upload.uri}/
      {key}/                    one folder a release, never written to again once it is complete
        config.json, *.safetensors, tokenizer files ...
        quantized/              the same in the number format of quantize.format, unless that is none
        evaluation/initial/     scores of the model that the run started from
        evaluation/exported/    scores of this one
        lineage.json            every stage's manifest, without the lists of files
        MANIFEST.json           names, sizes and checksums of all of the above, written last
      latest                    the key of the newest release, written after its manifest

The stage's artifact is a receipt: a copy of the release's manifest.
"""

import json
import re
from pathlib import Path
from typing import Any

from miles_core.config.run import RunConfig
from storage.filesystem import list_folder, open_store
from storage.manifest import MANIFEST_NAME, ArtifactRef, FileEntry, Manifest, hash_files, read_manifest, write_manifest
from storage.retry import StoreError
from storage.transfer import upload_folder
from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir

RECEIPT_FILE = "receipt.json"
_LATEST = "latest"
_LINEAGE = "lineage.json"
_FOLDERS = {"export": "", "evaluate-initial": "evaluation/initial/", "evaluate-exported": "evaluation/exported/"}
_QUANTIZED_FOLDER = {"export-quantized": "quantized/"}


def reads(config: RunConfig) -> dict[str, Any]:
    """Where the model goes."""
    return {"uri": config.upload.uri, "endpoint_url": _endpoint(config)}


def upload(job: StageJob, out: Path) -> StageResult:
    """Copies the export, its evaluations and its lineage to upload.uri, verified; with no uri it only says so.

    Raises:
        StoreError: the target holds something that is not of this release.
    """
    uri = job.config.upload.uri
    if uri is None:
        (out / RECEIPT_FILE).write_text(json.dumps({"uploaded": None}))
        return StageResult({"uploaded_files": 0, "skipped": "upload.uri is not set"}, {"receipt": RECEIPT_FILE})
    (out / _LINEAGE).write_text(json.dumps(_lineage(job), indent=1))
    manifest = _release_manifest(job, hash_files(out, [_LINEAGE]))
    _require_ours(uri, job, manifest)
    moved = _send(job, out, uri, manifest)
    (out / RECEIPT_FILE).write_text(manifest.model_dump_json(indent=1))
    account = {"uploaded_files": len(manifest.files), "uploaded_bytes": manifest.size, "moved_files": moved}
    return StageResult({**account, "target": f"{uri.rstrip('/')}/{job.key}"}, {"receipt": RECEIPT_FILE}, ("*",))


def is_current(job: StageJob, receipt: ArtifactRef) -> bool:
    """Whether the release is still where the receipt says, complete."""
    uri = job.config.upload.uri
    if uri is None:
        return True
    fs, root = open_store(uri, _endpoint(job.config))
    manifest = read_manifest(fs, f"{root}/{job.key}")
    present = list_folder(fs, f"{root}/{job.key}")
    return manifest is not None and all(
        entry.name in present and present[entry.name]["size"] == entry.size for entry in manifest.files
    )


def _folders(config: RunConfig) -> dict[str, str]:
    """Step whose artifact is published -> folder inside the release."""
    return _FOLDERS if config.quantize.format == "none" else _FOLDERS | _QUANTIZED_FOLDER


def _endpoint(config: RunConfig) -> str | None:
    return config.upload.endpoint_url or config.store.endpoint_url


def _lineage(job: StageJob) -> dict[str, Any]:
    manifests = {name: job.store.manifest(ref) for name, ref in job.inputs.items()}
    return {name: manifest.model_dump(mode="json", exclude={"files"}) for name, manifest in manifests.items()}


def _release_manifest(job: StageJob, lineage: list[FileEntry]) -> Manifest:
    exported = job.store.manifest(job.inputs["export"])
    files = [entry.model_copy(update={"volatile": True}) for entry in lineage]
    for name, folder in _folders(job.config).items():
        entries = job.store.manifest(job.inputs[name]).files
        files += [entry.model_copy(update={"name": folder + entry.name}) for entry in entries]
    return exported.model_copy(
        update={
            "kind": "release",
            "key": job.key,
            "stage": job.spec.stage,
            "files": tuple(files),
            "inputs": {name: ref.digest for name, ref in job.inputs.items()},
            "outputs": {"lineage": _LINEAGE},
            "config": job.params,
        }
    )


def _require_ours(uri: str, job: StageJob, manifest: Manifest) -> None:
    """A release's folder may hold the rest of an interrupted upload of the same release, and nothing else."""
    fs, root = open_store(uri, _endpoint(job.config))
    ours = {MANIFEST_NAME, *(entry.name for entry in manifest.files)}
    for name in sorted(list_folder(fs, f"{root}/{job.key}")):
        if name not in ours:
            raise StoreError(f"{uri}/{job.key}/{name} is not of this model; nothing is overwritten: change upload.uri")
    if fs.exists(f"{root}/{_LATEST}") and not re.fullmatch(rb"[0-9a-f]{32}\n", fs.cat_file(f"{root}/{_LATEST}")):
        raise StoreError(f"{uri}/{_LATEST} was not written by an upload; nothing is overwritten: change upload.uri")


def _send(job: StageJob, out: Path, uri: str, manifest: Manifest) -> int:
    endpoint = _endpoint(job.config)
    target = f"{uri.rstrip('/')}/{job.key}"
    lineage = [entry for entry in manifest.files if entry.name == _LINEAGE]
    moved = upload_folder(out, target, endpoint, lineage).moved_files
    for name, folder in _folders(job.config).items():
        files = job.store.manifest(job.inputs[name]).files
        report = upload_folder(
            job.fetch(name), f"{target}/{folder}".rstrip("/"), endpoint, files, progress=job.progress
        )
        moved += report.moved_files
    fs, root = open_store(uri, endpoint)
    write_manifest(fs, f"{root}/{job.key}", manifest)
    fs.pipe_file(f"{root}/{_LATEST}", f"{job.key}\n".encode())
    return moved


UPLOAD = StageSpec("upload", kind="release", version=1, reads=reads, run=in_work_dir(upload), is_current=is_current)
