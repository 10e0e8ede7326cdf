"""`python -m deployments.bootstrap [--preset NAME]`: all that a Prefect server needs to run the flow, in one command.

A work pool, a limit on trainings at a time, an automation that notices dead runs, and the deployments of prefect.yaml.
Calling it again changes nothing but the deployments, which follow prefect.yaml and the preset.
"""

import subprocess
import sys
import tempfile
from datetime import timedelta

import yaml
from prefect import get_client
from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from deployments.definitions import config_of_command_line, read_definitions
from flows.post_training import miles
from tasks.environment import DEFAULTS
from tasks.stage_task import TRAINING_LIMIT

WORK_POOL = "miles-pool"
DEAD_RUNS = "miles: runs without a heartbeat have crashed"
_HEARTBEATS_MISSED = 4


def main(arguments: list[str] | None = None) -> None:
    """Sets the server up, on which the environment or Prefect's profile points."""
    config = config_of_command_line("deployments.bootstrap", "Set a Prefect server up to run the flow.", arguments)
    ensure_server_objects()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(read_definitions(config), file)
        file.flush()
        _prefect("--no-prompt", "deploy", "--all", "--prefect-file", file.name)


def ensure_server_objects() -> None:
    """Creates the pool, the limit and the automation, where they are not there yet."""
    with get_client(sync_client=True) as client:
        _ensure_work_pool(client)
        _ensure_training_limit(client)
        if not client.read_automations_by_name(DEAD_RUNS):
            _notice_dead_runs()


def _ensure_work_pool(client: SyncPrefectClient) -> None:
    try:
        client.read_work_pool(WORK_POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type=ProcessWorker.type, base_job_template=template))


def _ensure_training_limit(client: SyncPrefectClient) -> None:
    """One training at a time: it takes the whole machine or cluster. Raise it where there is room for more."""
    try:
        client.read_global_concurrency_limit_by_name(TRAINING_LIMIT)
    except ObjectNotFound:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=TRAINING_LIMIT, limit=1))


def _notice_dead_runs() -> None:
    """A run whose process was killed says nothing any more: without this it would stay Running for ever."""
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Paused")}
    heartbeat = "prefect.flow-run.heartbeat"
    silence = int(DEFAULTS["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) * _HEARTBEATS_MISSED
    Automation(
        name=DEAD_RUNS,
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={heartbeat},
            expect={heartbeat} | ends,
            for_each={"prefect.resource.id"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            # Of this flow alone: others may be set to send heartbeats less often, or not at all.
            match_related=ResourceSpecification(
                {"prefect.resource.role": ["flow"], "prefect.resource.name": [miles.name]}
            ),
            threshold=1,
            within=timedelta(seconds=silence),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {silence} s")],
    ).create()


def _prefect(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "prefect", *arguments], check=True)


if __name__ == "__main__":
    main()
