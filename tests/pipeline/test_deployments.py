"""From the command that sets a server up, through a worker, to a finished run."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Finished

import deployments.bootstrap as bootstrap
from deployments.definitions import read_definitions
from deployments.local import served
from miles_core.config.load import load_config
from miles_core.config.run import RunConfig
from tasks.environment import DEFAULTS
from tasks.stage_task import TRAINING_LIMIT

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ("rl-post-train", "rl-post-train-nightly")


@pytest.fixture(scope="module")
def server(prefect_api: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where runs start
        bootstrap.main(["--preset", "tiny"])
        yield prefect_api


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


@pytest.mark.usefixtures("server")
def test_what_a_user_changed_on_the_server_stays() -> None:
    from prefect import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate

    with get_client(sync_client=True) as client:
        client.update_global_concurrency_limit(TRAINING_LIMIT, GlobalConcurrencyLimitUpdate(limit=2))
        bootstrap.ensure_server_objects()
        assert client.read_global_concurrency_limit_by_name(TRAINING_LIMIT).limit == 2
        assert len(client.read_automations_by_name(bootstrap.DEAD_RUNS)) == 1


@pytest.fixture
def worker(server: str, tmp_path: Path) -> Iterator[Path]:
    """A worker of the pool; gives its log."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", bootstrap.WORK_POOL]
    with log.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "1")
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        yield log
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_deployed_run_completes(
    worker: Path, run: Callable[..., Finished], config: RunConfig, artifact_text: Callable[[str], list[str]]
) -> None:
    run(config)
    parameters = {"config": config.model_copy(update={"name": "deployed"}).model_dump(mode="json")}
    command = [sys.executable, "-m", "prefect", "deployment", "run", "miles/rl-post-train", "--watch"]
    for name, value in parameters.items():
        command += ["--param", f"{name}={json.dumps(value)}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}\n{worker.read_text()}"
    deadline = time.monotonic() + 30
    while not (lineage := artifact_text("lineage-deployed")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lineage[0].count("| cached |") == 8


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
