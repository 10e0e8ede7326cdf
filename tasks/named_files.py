"""Files, folders and functions that a configuration names: for a key they count by what is in them, not by name."""

from pathlib import Path
from typing import Any, Literal

from miles_core.config.run import RunConfig
from miles_core.rewards.function import module_file, split_path
from miles_core.rollout.files import rollout_file
from tasks.file_digest import file_digests
from tasks.hub import is_wanted

_DATA_FILES = {"train": ("prompts", "conversations"), "eval": ("eval_prompts",)}


def data_and_reward(config: RunConfig, split: Literal["train", "eval"]) -> dict[str, Any]:
    """The sections `data` and `reward` as JSON values, with digests of the files of `split` and of the reward's
    module."""
    every_file = {name for names in _DATA_FILES.values() for name in names}
    data = config.data.model_dump(mode="json", exclude=every_file)
    for name in _DATA_FILES[split]:
        if (path := getattr(config.data, name)) is not None:
            data[name] = file_digest(Path(path))
    reward = config.reward.model_dump(mode="json")
    if config.reward.function is not None:
        module, _ = split_path(config.reward.function)
        file = module_file(module)
        if file is None:
            raise ValueError(f"reward.function {config.reward.function!r}: there is no module {module}")
        reward["module"] = file_digest(file)
    return {"data": data, "reward": reward}


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    (digest,) = file_digests([path]).values()
    return digest


def model_digests(folder: Path) -> dict[str, str]:
    """Name -> sha256 of the files of a Hugging Face folder that belong to the model."""
    return file_digests(sorted(path for path in folder.iterdir() if path.is_file() and is_wanted(path.name)))


def rollout_digests(config: RunConfig) -> dict[str, str]:
    """Name -> sha256 of the saved rollouts that a run trains on."""
    folder = Path(config.debug.load_rollouts or "")
    return file_digests([rollout_file(folder, i) for i in range(config.rollout.num_rollout)])
