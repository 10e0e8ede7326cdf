"""A real Prefect server, and one real run of the whole pipeline whose store the tests copy."""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import tasks.environment  # noqa: F401  (before anything imports Prefect)
from flows.server import start
from flows.summary import RunSummary
from miles_core.config.run import RunConfig

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"random": {"max_position": 64}},
    "data": {"task": {"name": "sort_digits", "params": {"num_digits": 2}, "train_size": 32, "eval_size": 8}},
    "rollout": {
        "num_rollout": 3,
        "batch_size": 4,
        "n_samples_per_prompt": 4,
        "sampling": {"max_new_tokens": 4},
    },
    "trainer": {"precision": "fp32", "micro_batch_size": 16, "checkpoint": {"interval": 1}},
}


def small_config(store: Path | str, endpoint_url: str | None = None, **sections: Any) -> RunConfig:
    """A run of three rollouts; `sections` are laid over it."""
    return RunConfig.model_validate({**SMALL, "store": {"uri": str(store), "endpoint_url": endpoint_url}, **sections})


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with a database of its own, to which Prefect's client in this process is pointed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        server = start()
        assert server is not None
        server.wait()
        from prefect.settings import PREFECT_API_URL, temporary_settings

        patch.setenv("PREFECT_API_URL", server.url)  # for processes that tests start
        with temporary_settings({PREFECT_API_URL: server.url}):
            yield server.url
        server.stop()


@dataclass(frozen=True)
class Finished:
    """A run that came to its end, as the server knows it."""

    summary: RunSummary
    task_states: dict[str, str]

    @property
    def flow_run_id(self) -> uuid.UUID:
        return uuid.UUID(self.summary.ui.rsplit("/", 1)[1])

    @property
    def ran(self) -> set[str]:
        return {stage.stage for stage in self.summary.stages if not stage.cached}


@pytest.fixture(scope="session")
def run(prefect_api: str) -> Callable[..., Finished]:
    """Runs the flow in this process."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from flows.post_training import miles

    def run(config: RunConfig, **options: Any) -> Finished:
        summary = miles(config, **options)
        finished = Finished(summary, {})
        this_run = FlowRunFilter(id=FlowRunFilterId(any_=[finished.flow_run_id]))
        deadline = time.monotonic() + 60
        with get_client(sync_client=True) as client:
            # The server learns of task runs by events, a moment later.
            while time.monotonic() < deadline:
                task_runs = client.read_task_runs(flow_run_filter=this_run)
                if len(task_runs) == len(summary.stages) and all(t.state and t.state.is_final() for t in task_runs):
                    break
                time.sleep(0.2)
        return replace(finished, task_states={task_run.name: task_run.state_name or "" for task_run in task_runs})

    return run


@pytest.fixture(scope="session")
def artifact_text(prefect_api: str) -> Callable[..., list[str]]:
    """The versions of an artifact, oldest first: of all runs, or of the one given."""
    from prefect import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.client.schemas.sorting import ArtifactSort

    def read(key: str, of: Finished | None = None) -> list[str]:
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(
                artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])), sort=ArtifactSort.ID_DESC
            )
        versions = [a for a in found if of is None or a.flow_run_id == of.flow_run_id]
        return [str(artifact.data) for artifact in sorted(versions, key=lambda a: a.created or 0)]

    return read


@pytest.fixture(scope="session")
def first_run(run: Callable[..., Finished], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Everything from nothing: model, conversion, training on Ray, export, evaluation, publication."""
    folder = tmp_path_factory.mktemp("first")
    config = small_config(folder / "store", upload={"uri": str(folder / "published")})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run(config)


@pytest.fixture
def config(first_run: Finished, tmp_path: Path) -> RunConfig:
    """The same run, on a copy of its store and of what it published."""
    original = Path(first_run.summary.paths["model"]).parents[1]
    shutil.copytree(original.parent, tmp_path, dirs_exist_ok=True)
    # The target's location is part of a release's key, so the copy publishes to a place of its own.
    return small_config(tmp_path / "store")
