"""export: the trained weights as Hugging Face folders that transformers and SGLang load.

Two steps: the weights as they were trained, and from these the weights in the rollout's number format.
"""

from pathlib import Path

from tasks.quantize import quantize, quantize_settings
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
EXPORT_QUANTIZED = StageSpec(
    "export", kind="exported_rollout_model", version=1, reads=quantize_settings, run=in_work_dir(quantize)
)
