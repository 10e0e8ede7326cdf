"""The flow, and the command line."""

import tasks.environment  # noqa: F401  (before anything imports Prefect)
