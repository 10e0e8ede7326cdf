"""The data and reward sections as inputs of a stage: files and functions count by what is in them, not by name."""

import importlib.util
from pathlib import Path
from typing import Any, Literal

from miles_core.config.run import RunConfig
from tasks.file_digest import file_digests


def data_params(config: RunConfig, split: Literal["train", "eval"]) -> dict[str, Any]:
    """`data` and `reward` as JSON values, with digests of the file that `split` reads and of the reward's module."""
    data = config.data.model_dump(mode="json", exclude={"prompts", "eval_prompts", "conversations"})
    for name in ("prompts", "conversations") if split == "train" else ("eval_prompts",):
        if (path := getattr(config.data, name)) is not None:
            data[name] = _digest(path)
    reward = config.reward.model_dump(mode="json")
    if config.reward.function is not None:
        reward["module"] = _module_digest(config.reward.function)
    return {"data": data, "reward": reward}


def _digest(path: str) -> str:
    (digest,) = file_digests([Path(path)]).values()
    return digest


def _module_digest(function: str) -> str:
    module = function.partition(":")[0]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"reward.function {function!r}: there is no module {module!r}; write package.module:name")
    return _digest(spec.origin)
