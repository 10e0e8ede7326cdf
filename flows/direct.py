"""Runs the flow from a terminal, where usually no Prefect server is running."""

import gc
import os
from collections.abc import Sequence

from flows.server import TemporaryServer
from flows.summary import RunSummary
from miles_core.config.run import RunConfig, Stage


def run_here(
    config: RunConfig,
    refresh: Sequence[Stage] = (),
    from_stage: Stage | None = None,
    server: TemporaryServer | None = None,
) -> RunSummary:
    """Runs `flows.post_training.miles` in this process.

    Args:
        server: what `flows.server.start` returned; it is used unless Prefect is configured to use another one.
    """
    # While a temporary server starts anyway: Prefect imports this only when the flow begins.
    import fastapi.encoders  # noqa: F401
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.post_training import miles

    gc.freeze()  # the modules stay: a process that need not search them for garbage ends a second sooner
    if server is None:
        return miles(config, tuple(refresh), from_stage)
    if PREFECT_API_URL.value():  # in a profile or settings file, which only Prefect itself can read
        server.stop()
        return miles(config, tuple(refresh), from_stage)
    server.wait()
    with temporary_settings({PREFECT_API_URL: server.url}):
        summary = miles(config, tuple(refresh), from_stage)
    return summary.model_copy(update={"ui": _ui_after(summary.ui)})


def _ui_after(link: str) -> str:
    """How to see the run when its server has ended: the database in $PREFECT_HOME stays."""
    home = os.environ.get("PREFECT_HOME")
    command = (f"PREFECT_HOME={home} " if home else "") + "prefect server start"
    return f"`{command}`, then http://127.0.0.1:4200/{link.split('/', 3)[3]}"
