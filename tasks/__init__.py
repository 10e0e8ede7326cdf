"""The stages of a run as cached steps, and what Prefect adds to them: retries, states, artifacts. One stage a file."""

import tasks.environment  # noqa: F401  (before anything imports Prefect)
