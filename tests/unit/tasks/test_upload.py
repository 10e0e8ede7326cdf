"""A release is published whole, once, and never over anything else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_configs import small_config

from miles_core.config.run import RunConfig
from storage.manifest import MANIFEST_NAME, ArtifactRef, Manifest, sha256_file
from storage.retry import StoreError
from storage.store import ArtifactStore
from tasks.pipeline import PIPELINE
from tasks.stage import StageJob, StageOutcome, run_stage
from tasks.upload import UPLOAD

FILES = {
    "export": {"config.json": "{}", "model.safetensors": "weights"},
    "export-quantized": {"config.json": "{4}", "model.safetensors": "small"},
    "evaluate-initial": {"evaluation.json": '{"mean_reward": 0.1}'},
    "evaluate-exported": {"evaluation.json": '{"mean_reward": 0.9}'},
}
RELEASE = {
    "config.json",
    "model.safetensors",
    "evaluation/initial/evaluation.json",
    "evaluation/exported/evaluation.json",
    "lineage.json",
    MANIFEST_NAME,
}


def inputs_of(config: RunConfig) -> dict[str, ArtifactRef]:
    """Small stand-ins for the artifacts of the steps before."""
    store, (upload,) = ArtifactStore(config.store.uri), [step for step in PIPELINE if step.spec is UPLOAD]
    refs = {}
    for name in upload.sources:
        folder = store.work_dir("input", name)
        for file, text in FILES.get(name, {"file": name}).items():
            (folder / file).write_text(text)
        refs[name] = store.commit("input", name, stage=name, inputs={}, outputs={}, config={}, account={})
    return refs


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "published"


@pytest.fixture
def job(tmp_path: Path, target: Path) -> StageJob:
    config = small_config(tmp_path / "store", upload={"uri": str(target)})
    return StageJob(UPLOAD, config, inputs_of(config))


def again(job: StageJob) -> StageOutcome:
    return run_stage(StageJob(UPLOAD, job.config, job.inputs))


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_release_holds_model_scores_and_lineage(job: StageJob, target: Path) -> None:
    run_stage(job)
    release = target / job.key
    assert files_in(target) == {"latest"} | {f"{job.key}/{name}" for name in RELEASE}
    assert (target / "latest").read_text() == f"{job.key}\n"
    assert (release / "model.safetensors").read_text() == "weights"
    manifest = Manifest.model_validate_json((release / MANIFEST_NAME).read_text())
    assert {entry.name: entry.sha256 for entry in manifest.files} == {
        name: sha256_file(release / name) for name in RELEASE - {MANIFEST_NAME}
    }
    lineage = json.loads((release / "lineage.json").read_text())
    assert {name: entry["key"] for name, entry in lineage.items()} == {name: name for name in job.inputs}


def test_receipt_accounts_for_what_was_sent(job: StageJob, target: Path) -> None:
    manifest = job.store.manifest(run_stage(job).ref)
    assert manifest.account["target"] == f"{target}/{job.key}"
    assert (manifest.account["uploaded_files"], manifest.account["moved_files"]) == (5, 5)


def test_a_complete_release_is_not_sent_again(job: StageJob) -> None:
    run_stage(job)
    assert again(job).cached


@pytest.mark.parametrize(
    "damage",
    [
        lambda release: (release / "model.safetensors").unlink(),
        lambda release: (release / "model.safetensors").write_text("cut"),
        lambda release: (release / MANIFEST_NAME).unlink(),
    ],
)
def test_a_damaged_release_is_repaired(job: StageJob, target: Path, damage: Callable[[Path], Any]) -> None:
    run_stage(job)
    damage(target / job.key)
    assert not again(job).cached
    assert (target / job.key / "model.safetensors").read_text() == "weights"
    assert again(job).cached


def test_another_model_goes_beside_the_first(job: StageJob, target: Path, tmp_path: Path) -> None:
    run_stage(job)
    first = files_in(target / job.key)
    other = StageJob(UPLOAD, job.config, {**job.inputs, "evaluate-initial": job.inputs["download"]})
    run_stage(other)
    assert files_in(target / job.key) == first
    assert (target / "latest").read_text() == f"{other.key}\n"


def test_foreign_file_in_the_release_is_kept_and_named(job: StageJob, target: Path) -> None:
    (target / job.key).mkdir(parents=True)
    (target / job.key / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"notes.txt is not of this model; nothing is overwritten: change upload.uri"):
        run_stage(job)
    assert files_in(target) == {f"{job.key}/notes.txt"}


def test_foreign_pointer_is_kept_and_named(job: StageJob, target: Path) -> None:
    target.mkdir()
    (target / "latest").write_text("version 3 of something else\n")
    with pytest.raises(StoreError, match=r"latest was not written by an upload.*change upload.uri"):
        run_stage(job)
    assert files_in(target) == {"latest"}


def test_without_a_target_it_says_so(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    job = StageJob(UPLOAD, config, inputs_of(config))
    account = job.store.manifest(run_stage(job).ref).account
    assert account == {"uploaded_files": 0, "skipped": "upload.uri is not set"}
    assert again(job).cached


def test_the_quantized_model_is_published_where_there_is_one(tmp_path: Path, target: Path) -> None:
    config = small_config(tmp_path / "store", upload={"uri": str(target)}, quantize={"format": "int4"})
    job = StageJob(UPLOAD, config, inputs_of(config))
    run_stage(job)
    release = target / job.key
    found = {str(path.relative_to(release)) for path in release.rglob("*") if path.is_file()}
    assert found == RELEASE | {"quantized/config.json", "quantized/model.safetensors"}
    assert (release / "quantized/model.safetensors").read_text() == "small"
    assert (release / "model.safetensors").read_text() == "weights"
