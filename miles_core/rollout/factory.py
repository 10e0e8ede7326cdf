"""The one place that knows which engines exist."""

from pathlib import Path

from miles_core.config.run import RunConfig
from miles_core.device import device_type
from miles_core.rollout.engine import RolloutEngine


def build_engine(config: RunConfig, folder: Path) -> RolloutEngine:
    """The engine that the configuration asks for, loaded with the Hugging Face folder `folder`."""
    if config.rollout.engine == "sglang":
        from miles_core.rollout.sglang.engine import SglangEngine

        return SglangEngine(folder, config.rollout.sglang, bucket_bytes=config.weight_sync.bucket_bytes)
    from miles_core.rollout.embedded.engine import EmbeddedEngine

    # In the trainer's own precision, whatever the folder's: the two then differ by rounding of the weights alone.
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[config.trainer.precision]
    return EmbeddedEngine(
        folder,
        device=device_type(),
        dtype=dtype,
        max_batch_tokens=config.rollout.max_batch_tokens,
        exact=config.trainer.exact,
    )
