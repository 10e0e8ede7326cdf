"""What a run shows in Prefect's UI: live training, scores, and where everything came from."""

import logging
import math
import re
import time
from collections.abc import Mapping
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from miles_core.config.run import RunConfig
from tasks.curve import as_markdown_image, curve_svg
from tasks.pipeline import PIPELINE
from tasks.stage import StageOutcome

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_UPDATES = 5.0
_UPDATES_OF_A_RUN = 100  # each is a version of the artifact that the server keeps


def artifact_key(what: str, run_name: str) -> str:
    """Key of an artifact: lower-case letters, digits and dashes, the same for every run of this name."""
    return f"{what}-{re.sub(r'[^a-z0-9]+', '-', run_name.lower()).strip('-')}"


class LiveTraining:
    """A progress bar and a curve of the reward (of the loss, where nothing is rewarded) that follow the training.

    They are for people only: an error of the server is logged, once, and the training goes on without them.
    """

    def __init__(self, config: RunConfig, seconds_between_updates: float = _SECONDS_BETWEEN_UPDATES) -> None:
        self._run_name, self._total = config.name, config.rollout.num_rollout
        self._what, self._metric = (
            ("loss", "train/loss") if config.algorithm.is_supervised else ("reward", "rollout/raw_reward")
        )
        self._interval = seconds_between_updates
        self._values: dict[int, float] = {}
        self._progress_id: UUID | None = None
        self._shown_at, self._shown_done = -math.inf, 0
        self._failed = False

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of one rollout. A rollout without the value (all its samples were dropped) has no point."""
        rollout, value = int(metrics["rollout_id"]), metrics.get(self._metric)
        if value is not None and math.isfinite(value):
            self._values[rollout] = value
        done = rollout + 1
        is_due = time.monotonic() - self._shown_at >= self._interval
        is_due &= done - self._shown_done >= self._total / _UPDATES_OF_A_RUN
        if self._values and not self._failed and (is_due or done == self._total):
            try:
                self._show(done)
            except Exception as error:
                logger.warning("live training is no longer shown in Prefect: %s", error)
                self._failed = True

    def _show(self, done: int) -> None:
        description = f"rollout {done} of {self._total}, {self._what} {self._values[max(self._values)]:.3f}"
        percent = 100.0 * done / self._total
        # _sync: inside the event loop that follows a cluster's job, these would only return a coroutine.
        if self._progress_id is None:
            key = artifact_key("training", self._run_name)
            created = create_progress_artifact(percent, key=key, description=description, _sync=True)  # type: ignore[call-arg]
            self._progress_id = cast(UUID, created)
        else:
            update_progress_artifact(self._progress_id, percent, description=description, _sync=True)  # type: ignore[call-arg]
        curve = curve_svg(self._values, f"{self._run_name}: {description}")
        image = as_markdown_image(curve, f"mean {self._what} by rollout")
        key = artifact_key(f"{self._what}-curve", self._run_name)
        create_markdown_artifact(image, key=key, description=description, _sync=True)  # type: ignore[call-arg]
        self._shown_at, self._shown_done = time.monotonic(), done


def publish_scores(run_name: str, initial: Mapping[str, Any], exported: Mapping[str, Any]) -> None:
    """A table of both evaluations."""
    rows = [
        {"score": name, "initial model": _rounded(initial[name]), "exported model": _rounded(exported[name])}
        for name in initial
        if name in exported and not isinstance(initial[name], Mapping)
    ]
    create_table_artifact(rows, key=artifact_key("evaluation", run_name), description="Held-out prompts")


def publish_lineage(run_name: str, done: Mapping[str, StageOutcome], failure: str | None) -> None:
    """A table of every step: where its artifact is, its digest, and what it was made from."""
    create_markdown_artifact(
        lineage_markdown(done, failure), key=artifact_key("lineage", run_name), description="Where everything came from"
    )


def lineage_markdown(done: Mapping[str, StageOutcome], failure: str | None) -> str:
    """The lineage as Markdown. Steps that are not in `done`: the first one failed if there is a `failure`."""
    lines = ["| step | state | seconds | artifact | digest | made from |", "|-|-|-:|-|-|-|"]
    for step in PIPELINE:
        outcome = done.get(step.name)
        if outcome is None:
            state = "not run" if failure is None else f"failed: {_one_cell(failure)}"
            lines.append(f"| {step.name} | {state} | | | | |")
            failure = None
            continue
        ref = outcome.ref
        state = "cached" if outcome.cached else "ran"
        parents = ", ".join(f"{source} `{done[source].ref.digest[:12]}`" for source in step.sources.values())
        lines.append(
            f"| {step.name} | {state} | {outcome.seconds:.1f} | [{ref.kind}/{ref.key}]({_link(ref.uri)}) "
            f"| `{ref.digest}` | {parents} |"
        )
    return "\n".join(lines)


def _link(uri: str) -> str:
    return uri if "://" in uri else f"file://{uri}"


def _one_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
