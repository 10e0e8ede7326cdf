"""What a run comes back with."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from miles_core.config.run import RunConfig
from storage.store import ArtifactStore
from tasks.stage import StageOutcome


class StageSummary(BaseModel):
    """One step of the pipeline."""

    stage: str  # name of the step; the evaluation has two
    cached: bool
    seconds: float
    uri: str
    digest: str


class Scores(BaseModel):
    """An evaluation, as far as the summary tells it; the whole of it is in the evaluation's artifact."""

    model_config = ConfigDict(extra="ignore")

    prompts: int
    mean_reward: float
    accuracy: float
    response_length_mean: float  # tokens


class RunSummary(BaseModel):
    """Numbers and places of a finished run."""

    name: str
    stages: list[StageSummary]
    reward_first_10: float | None  # mean reward of the first 10 rollouts; supervised fine-tuning has none
    reward_last_10: float | None
    loss_first_10: float
    loss_last_10: float
    initial: Scores  # held-out prompts, the model that the run started from, in the rollout's number format
    final: Scores  # the same prompts, the exported model
    paths: dict[str, str]
    ui: str  # where Prefect shows the run


def summarize(config: RunConfig, done: Mapping[str, StageOutcome], ui: str) -> RunSummary:
    """The summary of a run whose steps are all done."""
    store = ArtifactStore(config.store.uri, config.store.endpoint_url)
    manifests = {name: store.manifest(outcome.ref) for name, outcome in done.items()}
    training: Mapping[str, Any] = manifests["train"].account
    metrics = f"{done['train'].ref.uri}/{manifests['train'].outputs['metrics']}"
    published = manifests["upload"].account.get("target")
    return RunSummary(
        name=config.name,
        stages=[
            StageSummary(
                stage=name,
                cached=outcome.cached,
                seconds=outcome.seconds,
                uri=outcome.ref.uri,
                digest=outcome.ref.digest,
            )
            for name, outcome in done.items()
        ],
        reward_first_10=training["reward_first_10"],
        reward_last_10=training["reward_last_10"],
        loss_first_10=training["loss_first_10"],
        loss_last_10=training["loss_last_10"],
        initial=Scores.model_validate(manifests["evaluate-initial"].account),
        final=Scores.model_validate(manifests["evaluate-exported"].account),
        paths={"model": done["export"].ref.uri, "metrics": metrics} | ({"published": published} if published else {}),
        ui=ui,
    )
