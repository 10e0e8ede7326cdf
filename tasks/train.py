"""train: the reinforcement learning itself, on a local Ray or as a job of a cluster."""

from pathlib import Path
from typing import Any

from miles_core.config.run import RunConfig
from miles_core.run import KIND, TrainSpec
from storage.manifest import ArtifactRef
from tasks.data_inputs import data_params
from tasks.file_digest import folder_digests
from tasks.stage import StageJob, StageSpec


def reads(config: RunConfig) -> dict[str, Any]:
    """All that decides the trained weights: not where the loop runs, nor how often it saves."""
    return {
        **data_params(config, "train"),
        "seed": config.seed,
        "rollout": config.rollout.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "trainer": config.trainer.model_dump(mode="json", exclude={"checkpoint"}),
        "quantize": config.quantize.model_dump(mode="json"),
        "distillation": {
            "top_k": config.distillation.top_k,
            "teachers": [folder_digests(Path(folder)) for folder in config.distillation.teachers],
        },
    }


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
