"""What outlives the flow's process is stopped when a user ends the run, and left alone when a machine goes away."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import small_config

# A run whose first step ends in one of three ways. `stop` leaves a file.
RUN = """
import dataclasses, os, sys, time
from pathlib import Path

import tasks.stage_task as stage_task
from flows.post_training import miles
from miles_core.config.run import RunConfig
from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import State

ending, marker = sys.argv[2], Path(sys.argv[3])

def end(job):
    if ending == "ctrl-c":
        raise KeyboardInterrupt
    if ending == "cancelled":  # what `prefect flow-run cancel` tells the server before the worker sends SIGTERM
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, State(type=StateType.CANCELLING), force=True)
    os.kill(os.getpid(), 15)
    time.sleep(60)

first = stage_task.PIPELINE[0]
spec = dataclasses.replace(first.spec, run=end, stop=lambda job: marker.touch())
stage_task.PIPELINE = (dataclasses.replace(first, spec=spec), *stage_task.PIPELINE[1:])
miles(RunConfig.model_validate_json(sys.argv[1]))
"""


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize(("ending", "stopped"), [("ctrl-c", True), ("cancelled", True), ("machine-goes", False)])
def test_stop_is_called_for_a_user_alone(tmp_path: Path, ending: str, stopped: bool) -> None:
    marker = tmp_path / "stopped"
    config = small_config(tmp_path / "store").model_dump_json()
    result = subprocess.run([sys.executable, "-c", RUN, config, ending, str(marker)], capture_output=True, text=True)
    assert result.returncode != 0
    assert "Beginning flow run" in result.stderr
    assert marker.exists() is stopped, result.stderr
