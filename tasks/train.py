"""train: the reinforcement learning itself, on a local Ray or as a job of a cluster."""

from pathlib import Path
from typing import Any

from miles_core.config.run import RunConfig
from miles_core.run import KIND, TrainSpec
from storage.manifest import ArtifactRef
from tasks.named_files import data_and_reward, model_digests, rollout_digests
from tasks.stage import StageJob, StageSpec


def reads(config: RunConfig) -> dict[str, Any]:
    """All that decides the trained weights. A new option counts unless it is listed here."""
    params = config.model_dump(
        mode="json",
        exclude={
            "name": True,
            "model": True,  # an input
            "data": True,
            "reward": True,
            "distillation": {"teachers"},
            "trainer": {"checkpoint"},
            "evaluate": True,
            "upload": True,
            "store": True,
            "cluster": True,
            "debug": True,
        },
    )
    if config.debug.load_rollouts is not None:
        params["saved_rollouts"] = rollout_digests(config)
    teachers = [model_digests(Path(folder)) for folder in config.distillation.teachers]
    return {**params, **data_and_reward(config, "train"), "teachers": teachers}


def train(job: StageJob) -> ArtifactRef:
    """Trains, or goes on with an interrupted training. The loop commits its artifact by itself: on a cluster it
    outlives this process."""
    from miles_core.cluster.launch import run_training

    return run_training(_spec(job), job.on_metrics)


def stop(job: StageJob) -> bool:
    """Ends the cluster's job, if there is one."""
    from miles_core.cluster.launch import stop_training

    return stop_training(_spec(job))


def _spec(job: StageJob) -> TrainSpec:
    return TrainSpec(
        config=job.config, key=job.key, model=job.inputs["model"], rollout_model=job.inputs["rollout_model"]
    )


TRAIN = StageSpec("train", kind=KIND, version=1, reads=reads, run=train, stop=stop)
