"""Environment variables that must stand before Prefect, Ray or the Hugging Face libraries are imported.

The packages flows, tasks and deployments import this module first. A value that is already set wins.
"""

import os

DEFAULTS = {
    # Nothing is reported to anyone; offline, the attempts would also cost time and print errors.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The first start of a temporary server creates its database: the usual 20 s are not enough on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    # Seconds. A run without a heartbeat for four of them is marked as crashed (deployments/bootstrap.py).
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Under `uv run` Ray would otherwise rebuild the environment for its workers.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
