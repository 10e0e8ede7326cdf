"""export: the trained weights as a Hugging Face folder that transformers and SGLang load."""

from pathlib import Path

from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def export(job: StageJob, out: Path) -> StageResult:
    """Converts the last checkpoint of the input `training`; tokenizer and configuration are those of `reference`."""
    from conversion.torch_dist_to_hf import torch_dist_to_hf

    outputs = job.store.manifest(job.inputs["training"]).outputs
    checkpoint = job.fetch("training") / outputs["checkpoint"]
    return StageResult(torch_dist_to_hf(checkpoint, job.fetch("reference"), out, progress=job.progress))


EXPORT = StageSpec("export", kind="exported_model", version=1, reads=lambda config: {}, run=in_work_dir(export))
