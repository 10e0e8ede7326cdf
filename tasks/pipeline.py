"""The pipeline: its steps in order, and what each takes from which.

               ┌─► convert ──┐
download ──────┤             ├─► train ─► export ─► export-quantized ─► evaluate-exported ─┐
               └─► quantize ─┘                                                             ├─► upload
                        └─► evaluate-initial ──────────────────────────────────────────────┘

Both models are evaluated in the number format in which they are rolled out; quantize.format=none passes them through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_core.config.run import STAGES, RunConfig, Stage
from storage.manifest import ArtifactRef
from tasks.convert import CONVERT
from tasks.download import DOWNLOAD
from tasks.evaluate import EVALUATE
from tasks.export import EXPORT, EXPORT_QUANTIZED
from tasks.progress import stage_progress
from tasks.quantize import QUANTIZE
from tasks.stage import Reuse, StageJob, StageOutcome, StageSpec, run_stage
from tasks.train import TRAIN
from tasks.upload import UPLOAD


@dataclass(frozen=True)
class Step:
    """A use of a stage. Most stages are used once; the evaluation scores two models."""

    name: str
    spec: StageSpec
    sources: Mapping[str, str]  # name of an input -> step whose artifact it is

    def inputs(self, done: Mapping[str, StageOutcome]) -> dict[str, ArtifactRef]:
        """The artifacts that the step takes from those before it."""
        return {name: done[source].ref for name, source in self.sources.items()}


_BEFORE_UPLOAD = (
    Step("download", DOWNLOAD, {}),
    Step("convert", CONVERT, {"model": "download"}),
    Step("quantize", QUANTIZE, {"model": "download"}),
    Step("train", TRAIN, {"model": "convert", "rollout_model": "quantize"}),
    Step("export", EXPORT, {"training": "train", "model": "convert"}),
    Step("export-quantized", EXPORT_QUANTIZED, {"model": "export"}),
    Step("evaluate-initial", EVALUATE, {"model": "quantize"}),
    Step("evaluate-exported", EVALUATE, {"model": "export-quantized"}),
)
PIPELINE = (*_BEFORE_UPLOAD, Step("upload", UPLOAD, {step.name: step.name for step in _BEFORE_UPLOAD}))


def reuse_of(stage: Stage, refresh: Sequence[Stage], from_stage: Stage | None) -> Reuse:
    """What a run may take from the store: before `from_stage` it must, from there on and for `refresh` it may not."""
    if stage in refresh:
        return "never"
    if from_stage is None:
        return "complete"
    return "required" if STAGES.index(stage) < STAGES.index(from_stage) else "never"


def run_single_stage(config: RunConfig, stage: Stage, *, refresh: bool = False) -> dict[str, StageOutcome]:
    """Runs one stage without Prefect and returns the outcomes of its steps by name.

    Raises:
        MissingArtifactError: an earlier stage has not run with this configuration.
    """
    wanted = STAGES.index(stage)
    done: dict[str, StageOutcome] = {}
    for step in PIPELINE:
        position = STAGES.index(step.spec.stage)
        if position <= wanted:
            reuse: Reuse = "required" if position < wanted else "never" if refresh else "complete"
            with stage_progress(step.name) as progress:
                done[step.name] = run_stage(StageJob(step.spec, config, step.inputs(done), progress), reuse)
    return {step.name: done[step.name] for step in PIPELINE if step.spec.stage == stage}
