"""What a Prefect server needs to run the flow, and where it can run."""

import tasks.environment  # noqa: F401  (before anything imports Prefect)
