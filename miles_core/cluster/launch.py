"""Runs the loop: on a Ray of this process, or as a job of a cluster that outlives it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from miles_core.cluster.session import local_ray
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import OnMetrics
from miles_core.run import KIND, TrainSpec, train
from miles_core.sampling import sample_rollouts
from storage.manifest import ArtifactRef

METRICS_PREFIX = "MILES_METRICS "
SPEC_VARIABLE = "MILES_TRAIN_SPEC"
_LOG_LINES_SHOWN = 40


class TrainingJobError(RuntimeError):
    """The job on the cluster failed or was stopped; the message holds the end of its log."""


def run_training(spec: TrainSpec, on_metrics: OnMetrics) -> ArtifactRef:
    """Trains as `cluster.address` says and returns the committed artifact.

    On a cluster the job goes on when this process ends, and a later call finds it by `spec.key` and follows it.
    Raises what the loop raised (local), or TrainingJobError with the job's own last lines (cluster).
    """
    if spec.config.cluster.address is None:
        with local_ray(spec.config.cluster):
            return train(spec, on_metrics)
    return asyncio.run(_follow(spec, on_metrics))


def run_sampling(config: RunConfig, model_folder: Path) -> Path:
    """Samples rollouts without training, on a Ray of this process; see miles_core/sampling.py."""
    with local_ray(config.cluster):
        return sample_rollouts(config, model_folder)


def stop_training(spec: TrainSpec) -> bool:
    """Stops the cluster job of this spec, if one runs."""
    if spec.config.cluster.address is None:
        return False
    client = _client(spec)
    running = _attempts(client, spec)[0]
    return running is not None and client.stop_job(running)


def _client(spec: TrainSpec) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(spec.config.cluster.address)


def _attempts(client: Any, spec: TrainSpec) -> tuple[str | None, int]:
    """The attempt that still runs, if any, and the number of attempts so far."""
    prefix = f"miles-{spec.key}-a"
    mine = [job for job in client.list_jobs() if (job.submission_id or "").startswith(prefix)]
    running = [job.submission_id for job in mine if not job.status.is_terminal()]
    return (running[0] if running else None), len(mine)


async def _follow(spec: TrainSpec, on_metrics: OnMetrics) -> ArtifactRef:
    client = _client(spec)
    job_id, attempts = _attempts(client, spec)
    if job_id is None:
        job_id = client.submit_job(
            entrypoint="python -m miles_core.cluster.job",
            submission_id=f"miles-{spec.key}-a{attempts + 1}",
            runtime_env={"env_vars": {SPEC_VARIABLE: spec.model_dump_json(), "RAY_USAGE_STATS_ENABLED": "0"}},
            metadata={"key": spec.key, "name": spec.config.name},
        )
    tail: list[str] = []
    async for line in _lines(client.tail_job_logs(job_id)):
        if line.startswith(METRICS_PREFIX):
            on_metrics(json.loads(line.removeprefix(METRICS_PREFIX)))
        else:
            tail = [*tail[-_LOG_LINES_SHOWN:], line]
    info = client.get_job_info(job_id)
    while not info.status.is_terminal():  # the log stream can end a moment before the job does
        await asyncio.sleep(0.2)
        info = client.get_job_info(job_id)
    ready = spec.store.find(KIND, spec.key)
    if ready is None:
        raise TrainingJobError(f"job {job_id} ended as {info.status}: {info.message}\n" + "\n".join(tail))
    return ready


async def _lines(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    rest = ""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        for line in whole:
            yield line
    if rest:
        yield rest
