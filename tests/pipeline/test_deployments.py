"""From the command that sets a server up, through a worker, to a finished run."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import small_config

import deployments.bootstrap as bootstrap
import tasks.stage_task as stage_task
from deployments.definitions import read_definitions
from deployments.local import served
from miles_core.config.load import load_config
from miles_core.config.run import RunConfig
from storage.store import ArtifactStore
from tasks.environment import DEFAULTS
from tasks.pipeline import PIPELINE
from tasks.stage import Reuse, StageJob
from tasks.stage_task import TRAINING_LIMIT

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ("rl-post-train", "rl-post-train-nightly")


@pytest.fixture(scope="module")
def server(prefect_api: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where runs start
        bootstrap.main(["--preset", "tiny"])
        yield prefect_api


@pytest.fixture(scope="module")
def worker(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A worker of the pool; gives its log."""
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", bootstrap.WORK_POOL]
    with log.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        yield log
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def deployed(worker: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of the deployment, everything from nothing."""
    config = small_config(tmp_path_factory.mktemp("deployed") / "store", name="deployed")
    command = [sys.executable, "-m", "prefect", "deployment", "run", f"miles/{DEPLOYMENTS[0]}", "--watch"]
    parameter = f"config={json.dumps(config.model_dump(mode='json'))}"
    result = subprocess.run([*command, "--param", parameter], capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}\n{worker.read_text()}"
    return config


@pytest.mark.usefixtures("server")
def test_server_has_what_runs_need() -> None:
    from prefect import get_client

    with get_client(sync_client=True) as client:
        assert client.read_work_pool(bootstrap.WORK_POOL).type == "process"
        assert client.read_global_concurrency_limit_by_name(TRAINING_LIMIT).limit == 1
        assert len(client.read_automations_by_name(bootstrap.DEAD_RUNS)) == 1
        manual, nightly = (client.read_deployment_by_name(f"miles/{name}") for name in DEPLOYMENTS)
    preset = load_config("tiny", None, ()).model_dump(mode="json")
    for deployment in (manual, nightly):
        assert deployment.parameters == {"config": preset}
        assert deployment.job_variables["env"] == DEFAULTS
        assert deployment.parameter_openapi_schema is not None
        assert "RunConfig" in deployment.parameter_openapi_schema["definitions"]
    assert not manual.schedules
    (schedule,) = nightly.schedules
    assert schedule.schedule.model_dump(include={"cron", "timezone"}) == {"cron": "0 2 * * *", "timezone": "UTC"}
    assert nightly.global_concurrency_limit is not None
    assert nightly.global_concurrency_limit.limit == 1


def test_deployed_run_completes(deployed: RunConfig, artifact_text: Callable[..., list[str]]) -> None:
    deadline = time.monotonic() + 60
    while not (lineage := artifact_text("lineage-deployed")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lineage[0].count("| ran |") == len(PIPELINE)
    assert {entry.complete for entry in ArtifactStore(deployed.store.uri).ls()} == {True}


def test_training_takes_a_slot_and_a_cached_one_does_not(deployed: RunConfig) -> None:
    from prefect import get_client

    store = ArtifactStore(deployed.store.uri)
    refs = {entry.kind: store.find(entry.kind, entry.key) for entry in store.ls()}
    inputs = {"model": refs["torch_dist"], "rollout_model": refs["rollout_model"]}
    train = next(step.spec for step in PIPELINE if step.name == "train")
    job = StageJob(train, deployed, {name: ref for name, ref in inputs.items() if ref is not None})
    with get_client(sync_client=True) as client:

        def active_slots(reuse: Reuse) -> int:
            with stage_task._slot(job, reuse):
                return client.read_global_concurrency_limit_by_name(TRAINING_LIMIT).active_slots

        assert [active_slots("never"), active_slots("complete"), active_slots("required")] == [1, 0, 0]
        shutil.rmtree(Path(store.uri, "train"))
        assert active_slots("complete") == 1
        assert client.read_global_concurrency_limit_by_name(TRAINING_LIMIT).active_slots == 0


@pytest.mark.usefixtures("server")
def test_what_a_user_changed_on_the_server_stays() -> None:
    from prefect import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate

    with get_client(sync_client=True) as client:
        client.update_global_concurrency_limit(TRAINING_LIMIT, GlobalConcurrencyLimitUpdate(limit=2))
        bootstrap.ensure_server_objects()
        assert client.read_global_concurrency_limit_by_name(TRAINING_LIMIT).limit == 2
        assert len(client.read_automations_by_name(bootstrap.DEAD_RUNS)) == 1


@pytest.mark.usefixtures("prefect_api")
def test_serving_from_one_process_takes_the_same_definitions() -> None:
    from prefect import get_client

    config = load_config("tiny", None, ())
    for definition in read_definitions(config)["deployments"]:
        served({**definition, "name": f"{definition['name']}-served"}).apply()
    with get_client(sync_client=True) as client:
        manual, nightly = (client.read_deployment_by_name(f"miles/{name}-served") for name in DEPLOYMENTS)
    assert manual.parameters == nightly.parameters == {"config": config.model_dump(mode="json")}
    assert manual.work_pool_name is nightly.work_pool_name is None
    assert [schedule.model_dump()["schedule"]["cron"] for schedule in nightly.schedules] == ["0 2 * * *"]
