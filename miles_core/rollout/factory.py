"""The one place that knows which engines exist."""

from pathlib import Path

from miles_core.config.run import RunConfig
from miles_core.rollout.engine import RolloutEngine


def build_engine(config: RunConfig, folder: Path) -> RolloutEngine:
    """The engine that the configuration asks for, loaded with the Hugging Face folder `folder`."""
    if config.rollout.engine == "sglang":
        from miles_core.rollout.sglang.engine import SglangEngine

        return SglangEngine(folder, config.rollout.sglang)
    from miles_core.rollout.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(folder, max_batch_tokens=config.rollout.max_batch_tokens)
