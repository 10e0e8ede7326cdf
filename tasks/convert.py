"""convert: Hugging Face folder to Megatron's torch_dist format, for the trainer."""

from pathlib import Path

from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def convert(job: StageJob, out: Path) -> StageResult:
    """Converts the input `model`; the account names every tensor that was left out."""
    from conversion.hf_to_torch_dist import hf_to_torch_dist

    layers = job.config.model.mtp_num_layers
    return StageResult(hf_to_torch_dist(job.fetch("model"), out, mtp_num_layers=layers, progress=job.progress))


CONVERT = StageSpec(
    "convert",
    kind="torch_dist",
    version=1,
    reads=lambda config: {"mtp_num_layers": config.model.mtp_num_layers},
    run=in_work_dir(convert),
)
