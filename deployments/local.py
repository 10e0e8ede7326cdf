"""`python -m deployments.local [--preset NAME]`: serves both deployments from this process, without a work pool.

For one machine: runs start as processes of this one, and end with it.
"""

from typing import Any, cast

from prefect import serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment

from deployments.definitions import config_of_command_line, read_definitions
from flows.post_training import miles


def main(arguments: list[str] | None = None) -> None:
    """Serves until interrupted."""
    config = config_of_command_line("deployments.local", "Serve the deployments from this process.", arguments)
    serve(*(served(definition) for definition in read_definitions(config)["deployments"]))


def served(definition: dict[str, Any]) -> RunnerDeployment:
    """A deployment of prefect.yaml as one of this process."""
    limit = definition.get("concurrency_limit")
    deployment = miles.to_deployment(
        name=definition["name"],
        description=definition["description"],
        tags=definition["tags"],
        parameters=definition["parameters"],
        schedules=[CronSchedule(cron=s["cron"], timezone=s["timezone"]) for s in definition.get("schedules", ())],
        concurrency_limit=ConcurrencyLimitConfig(**limit) if limit else None,
    )
    return cast(RunnerDeployment, deployment)  # typed for callers in an event loop too


if __name__ == "__main__":
    main()
