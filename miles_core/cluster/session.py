"""Connection to Ray: one of our own on this machine, or the cluster that a job runs in."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from miles_core.config.run import ClusterConfig

_START_ATTEMPTS = 3

# Defaults only: what the user has set wins.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` Ray would otherwise rebuild the environment for workers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES alone in actors that take no GPU
    "RAY_DEDUP_LOGS": "0",
}


@contextmanager
def local_ray(cluster: ClusterConfig) -> Iterator[None]:
    """A Ray that lives as long as this process. Its actors end within seconds of a SIGKILL of the driver."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        yield
        return
    _start(cluster)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def joined_ray() -> Iterator[None]:
    """The cluster that the present job was submitted to."""
    ray.init(address="auto", namespace="miles", log_to_driver=True, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def _start(cluster: ClusterConfig) -> None:
    for attempt in range(_START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=cluster.num_cpus,
                include_dashboard=False,
                namespace="miles",
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=cluster.object_store_bytes,
            )
            return
        except Exception as error:
            # Ray gives its own processes 30 s, fixed, which a busy machine can exceed; it raises a bare Exception.
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise


def resolve(reference: Any) -> Any:
    """`ray.get` that raises the actor's own exception, with the remote traceback as its cause."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(
            f"a training process died: {error}. Often memory: look for the kernel's out-of-memory message, or lower "
            "trainer.micro_batch_size and rollout.batch_size"
        ) from error
