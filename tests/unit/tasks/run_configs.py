"""Configurations of small runs."""

from pathlib import Path
from typing import Any

from miles_core.config.run import RunConfig

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"random": {"max_position": 64}},
    "data": {"task": {"name": "sort_digits", "params": {"num_digits": 2}, "train_size": 32, "eval_size": 8}},
    "rollout": {
        "num_rollout": 3,
        "batch_size": 4,
        "n_samples_per_prompt": 4,
        "sampling": {"max_new_tokens": 4},
    },
    "trainer": {"precision": "fp32", "micro_batch_size": 16},
}


def small_config(store: Path | str, **sections: Any) -> RunConfig:
    """A run of three rollouts; `sections` are laid over it."""
    return RunConfig.model_validate({**SMALL, "store": {"uri": str(store)}, **sections})
