"""quantize: the model in the number format in which the rollout engine holds it."""

from pathlib import Path

from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def quantize(job: StageJob, out: Path) -> StageResult:
    """Writes the input `model` as quantize.format says; `none` passes it through."""
    from conversion.quantization.checkpoint import quantize_folder

    settings = job.config.quantize
    return StageResult(quantize_folder(job.fetch("model"), out, settings.format, settings.group_size, job.progress))


QUANTIZE = StageSpec(
    "quantize",
    kind="rollout_model",
    version=1,
    reads=lambda config: config.quantize.model_dump(mode="json"),
    run=in_work_dir(quantize),
)
