"""Runs that fail: what is retried, what is not, and what is left behind."""

import dataclasses
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, small_config

import tasks.stage_task as stage_task
from miles_core.config.run import RunConfig
from storage.manifest import ArtifactRef
from tasks.pipeline import PIPELINE
from tasks.stage import StageJob


@pytest.fixture
def folder(first_run: Finished, tmp_path: Path) -> Path:
    """The first run's model as a user's folder."""
    (download,) = [stage for stage in first_run.summary.stages if stage.stage == "download"]
    ignored = shutil.ignore_patterns("MANIFEST.json")
    return Path(shutil.copytree(download.uri, tmp_path / "mine", ignore=ignored))


def ended_as(name: str, state: str, attempts: int) -> bool:
    """Whether the latest task run `name` ended so; the server learns of it by events, a moment later."""
    from prefect import get_client

    deadline = time.monotonic() + 60
    found: list[tuple[str | None, int]] = []
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            task_runs = sorted(client.read_task_runs(), key=lambda task_run: task_run.created or 0)
            found = [(task_run.state_name, task_run.run_count) for task_run in task_runs if task_run.name == name]
            if found and found[-1] == (state, attempts):
                return True
            time.sleep(0.2)
    print(f"task runs {name}: {found}")
    return False


def test_fault_of_the_model_fails_at_once_and_the_rest_is_shown_as_not_run(
    run: Callable[..., Finished], folder: Path, tmp_path: Path, artifact_text: Callable[..., list[str]]
) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    name = f"broken-{uuid.uuid4().hex[:6]}"
    with pytest.raises(ValueError, match=r"model.safetensors is truncated"):
        run(small_config(tmp_path / "store", name=name, model={"path": str(folder)}))
    assert ended_as("download", "Failed", attempts=1)
    (lineage,) = artifact_text(f"lineage-{name}")
    assert "| download | failed: CheckpointError:" in lineage
    assert lineage.count("| not run |") == len(PIPELINE) - 1


def test_failed_stage_runs_again_when_its_fault_is_gone(
    run: Callable[..., Finished], config: RunConfig, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "latest").write_text("someone else's")
    published = small_config(tmp_path / "store", upload={"uri": str(target)})
    with pytest.raises(ValueError, match=r"change upload.uri"):
        run(published)
    assert ended_as("upload", "Failed", attempts=1)
    (target / "latest").unlink()
    assert run(published).ran == {"upload"}
    assert run(published).ran == set()


def test_fault_that_passes_is_tried_again(
    run: Callable[..., Finished], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    step = PIPELINE[-1]

    def unsteady(job: StageJob) -> ArtifactRef:
        calls.append(job.key)
        if len(calls) == 1:
            raise ConnectionResetError("the network is down")
        return step.spec.run(job)

    replaced = dataclasses.replace(step, spec=dataclasses.replace(step.spec, run=unsteady))
    monkeypatch.setattr(stage_task, "PIPELINE", (*PIPELINE[:-1], replaced))
    assert run(config).ran == {"upload"}
    assert len(calls) == 2
    assert ended_as("upload", "Completed", attempts=2)
