"""export: the trained weights as a Hugging Face folder that transformers and SGLang load."""

from pathlib import Path

from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def export(job: StageJob, out: Path) -> StageResult:
    """Converts the last checkpoint of the input `training`; tokenizer, configuration and dtypes are those that the
    conversion kept beside `model`, the checkpoint that training began with."""
    from conversion.hf_to_torch_dist import HF_FOLDER
    from conversion.torch_dist_to_hf import torch_dist_to_hf

    outputs = job.store.manifest(job.inputs["training"]).outputs
    checkpoint = job.fetch("training") / outputs["checkpoint"]
    reference = job.fetch("model") / HF_FOLDER
    return StageResult(torch_dist_to_hf(checkpoint, reference, out, progress=job.progress))


EXPORT = StageSpec("export", kind="exported_model", version=1, reads=lambda config: {}, run=in_work_dir(export))
