"""What all stages share: a key, a look into the store, a lock, a work folder, a manifest at the end. No Prefect here.

A stage's result is an artifact at `{store}/{kind}/{key}/`; the key says what went in, and the manifest, written last,
that all of it came out. The store is the only record of what is done: there is no second one that could disagree.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from miles_core.config.run import RunConfig, Stage
from storage.manifest import ArtifactRef
from storage.progress import Progress, no_progress
from storage.store import ArtifactStore
from tasks.cache_key import stage_key

OnMetrics = Callable[[dict[str, Any]], None]

Reuse = Literal["complete", "never", "required"]
"""complete: take the artifact from the store if it is complete, else run. never: run, even so. required: take it, or
raise `MissingArtifactError`."""


class MissingArtifactError(ValueError):
    """A stage was to be skipped, and its artifact is not in the store."""


class StageOutcome(BaseModel):
    """What became of one stage."""

    model_config = ConfigDict(frozen=True)

    ref: ArtifactRef
    cached: bool
    seconds: float


@dataclass(frozen=True)
class StageResult:
    """What a stage's function has to say of the folder that it wrote."""

    account: dict[str, Any]  # what came in, was used, was dropped
    outputs: dict[str, str] = field(default_factory=dict)  # name -> path in the folder that later stages look for
    volatile: tuple[str, ...] = ()  # patterns of files that may differ between equal runs


@dataclass(frozen=True)
class StageSpec:
    """A kind of stage."""

    stage: Stage
    kind: str  # folder of its artifacts in the store
    version: int  # of its code: raise it when the same inputs give something else than before
    reads: Callable[[RunConfig], dict[str, Any]]  # everything outside its inputs that the result depends on
    run: Callable[["StageJob"], ArtifactRef]
    is_current: Callable[["StageJob", ArtifactRef], bool] = lambda job, ref: True  # beyond being complete in the store
    stop: Callable[["StageJob"], object] = lambda job: None  # ends what outlives this process, when a run is cancelled


@dataclass(frozen=True)
class StageJob:
    """One run of a stage: what its function may look at."""

    spec: StageSpec
    config: RunConfig
    inputs: Mapping[str, ArtifactRef]
    progress: Progress = no_progress
    on_metrics: OnMetrics = lambda metrics: None

    @cached_property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.config.store.uri, self.config.store.endpoint_url)

    @cached_property
    def params(self) -> dict[str, Any]:
        """The part of the configuration that the stage reads, with digests of the files it names."""
        return self.spec.reads(self.config)

    @cached_property
    def key(self) -> str:
        digests = {name: ref.digest for name, ref in self.inputs.items()}
        return stage_key(self.spec.stage, self.spec.version, self.params, digests)

    def find(self) -> ArtifactRef | None:
        """The artifact, if it is complete and current."""
        ref = self.store.find(self.spec.kind, self.key)
        return ref if ref is not None and self.spec.is_current(self, ref) else None

    def fetch(self, name: str) -> Path:
        """A local folder with the input `name`."""
        return self.store.fetch(self.inputs[name], progress=self.progress)


def in_work_dir(
    function: Callable[[StageJob, Path], StageResult], *, resumes: bool = False
) -> Callable[[StageJob], ArtifactRef]:
    """Makes a stage of a function that fills a folder.

    Args:
        resumes: the function goes on with what an interrupted attempt left; otherwise it begins with an empty folder.
    """

    def run(job: StageJob) -> ArtifactRef:
        out = job.store.work_dir(job.spec.kind, job.key)
        if not resumes:
            shutil.rmtree(out)
            out.mkdir()
        result = function(job, out)
        return job.store.commit(
            job.spec.kind,
            job.key,
            stage=job.spec.stage,
            inputs={name: ref.digest for name, ref in job.inputs.items()},
            outputs=result.outputs,
            config=job.params,
            account=result.account,
            volatile=result.volatile,
            progress=job.progress,
        )

    return run


def run_stage(job: StageJob, reuse: Reuse = "complete") -> StageOutcome:
    """Takes a stage's artifact from the store, or makes it. Two runs at once on one machine do the work once."""
    begin = time.monotonic()
    spec, store = job.spec, job.store
    ref = None if reuse == "never" else job.find()
    if ref is None and reuse == "required":
        raise MissingArtifactError(
            f"the result of stage {spec.stage} is not in {store.uri} (looked for {spec.kind}/{job.key}): "
            f"run {spec.stage} first, with the same configuration"
        )
    cached = ref is not None
    if ref is None:
        with store.lock(spec.kind, job.key):
            # Another run may have made it while this one waited for the lock.
            ref = None if reuse == "never" else job.find()
            cached = ref is not None
            if ref is None:
                # Finished, and to be made anew. What an interrupted attempt left stays: the stage may go on with it.
                if store.find(spec.kind, job.key) is not None:
                    store.remove(spec.kind, job.key)
                ref = spec.run(job)
    return StageOutcome(ref=ref, cached=cached, seconds=time.monotonic() - begin)
