"""quantize: the model in the number format in which the rollout engine holds it."""

from pathlib import Path
from typing import Any

from miles_core.config.run import RunConfig
from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def quantize_settings(config: RunConfig) -> dict[str, Any]:
    """The number format."""
    return config.quantize.model_dump(mode="json")


def quantize(job: StageJob, out: Path) -> StageResult:
    """Writes the input `model` as quantize.format says; `none` passes it through."""
    from conversion.quantization.checkpoint import quantize_folder

    settings = job.config.quantize
    return StageResult(quantize_folder(job.fetch("model"), out, settings.format, settings.group_size, job.progress))


QUANTIZE = StageSpec(
    "quantize",
    kind="rollout_model",
    version=1,
    reads=quantize_settings,
    run=in_work_dir(quantize),
)
