"""Rollouts as files: `rollout_0000000.npz` holds the groups of rollout 0, and what they were sampled from.

The arrays of all samples lie end to end, in the names of `Sample`'s fields; `meta` is a JSON text with the rest and
with the lengths to cut by. A file is written under another name first, so that one that is there is whole.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np

from conversion.safetensors_io import SafetensorsFolder
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import Metrics
from miles_core.rollout.files import rollout_file
from miles_core.rollout.generate import rollout_metrics
from miles_core.types import Sample, SampleGroup, SampleStatus
from miles_core.weight_sync.bucket import tensor_digest

_FORMAT = 1
_PER_TOKEN = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")
_PER_SAMPLE = ("group_index", "index", "prompt_index", "response_length", "response", "status", "reward", "metadata")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
# What differs between config.json files of one model.
_NO_PART_OF_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "quantization_config")


class SavedRolloutError(ValueError):
    """A saved rollout that is damaged, or does not belong to this model or run."""


@dataclass(frozen=True)
class Origin:
    """What a rollout was sampled from; digests are sha256."""

    model: str  # of config.json
    tokenizer: str  # of the tokenizer's files
    temperature: float

    @classmethod
    def of(cls, folder: Path, temperature: float) -> Self:
        """Of a Hugging Face folder."""
        config = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in config.items() if name not in _NO_PART_OF_THE_MODEL}
        tokenizer = hashlib.sha256()
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                tokenizer.update(name.encode() + (folder / name).read_bytes())
        model = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
        return cls(model.hexdigest(), tokenizer.hexdigest(), temperature)


@dataclass(frozen=True)
class SavedRollout:
    """One rollout as it lies on disk."""

    rollout_id: int
    origin: Origin
    weights: str  # `weights_digest` of what the engines served
    groups: list[SampleGroup]


def weights_digest(digests: Mapping[str, str]) -> str:
    """One sha256 for all tensors, from that of each by name."""
    return hashlib.sha256(json.dumps(dict(digests), sort_keys=True).encode()).hexdigest()


def folder_weights_digest(folder: Path) -> str:
    """`weights_digest` of the tensors of a Hugging Face folder."""
    with SafetensorsFolder(folder) as opened:
        return weights_digest({name: tensor_digest(opened.read(name)) for name in opened.names})


@dataclass(frozen=True)
class RolloutFolder:
    """Where a run puts its rollouts."""

    folder: Path
    origin: Origin

    def save(self, rollout_id: int, groups: Sequence[SampleGroup], weights: str) -> None:
        """Writes one rollout; a file of the same number is replaced."""
        samples = [s for group in groups for s in group.samples]
        rows: list[dict[str, Any]] = []
        for s in samples:
            row = {name: getattr(s, name) for name in _PER_SAMPLE}
            rows.append(row | {"length": len(s.tokens), "has_routes": s.routed_experts is not None})
        meta = {
            "format": _FORMAT,
            "rollout_id": rollout_id,
            "origin": asdict(self.origin),
            "weights": weights,
            "group_sizes": [len(group.samples) for group in groups],
            "samples": rows,
        }
        arrays: dict[str, Any] = {name: np.concatenate([getattr(s, name) for s in samples]) for name in _PER_TOKEN}
        if routes := [s.routed_experts for s in samples if s.routed_experts is not None]:
            arrays["routed_experts"] = np.concatenate(routes)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = rollout_file(self.folder, rollout_id)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            np.savez(file, meta=np.array(json.dumps(meta)), **arrays)
        os.replace(partial, path)


def saved_rollouts(config: RunConfig, model_folder: Path) -> RolloutFolder | None:
    """Where the rollouts of a run go, if anywhere; `model_folder` is its Hugging Face folder."""
    if config.debug.save_rollouts is None:
        return None
    origin = Origin.of(model_folder, config.rollout.sampling.temperature)
    return RolloutFolder(Path(config.debug.save_rollouts), origin)


def load_rollout(path: Path) -> SavedRollout:
    """Reads a file of `RolloutFolder.save`.

    Raises SavedRolloutError with the file's name when it is no such file, or its parts do not fit each other.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        meta = json.loads(str(arrays.pop("meta")))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise SavedRolloutError(f"{path} is no saved rollout: {error}") from error
    if meta["format"] != _FORMAT:
        raise SavedRolloutError(f"{path} has format {meta['format']}, this version reads {_FORMAT}: sample it again")
    samples = _cut(path, meta["samples"], arrays)
    groups, start = [], 0
    for size in meta["group_sizes"]:
        groups.append(SampleGroup(tuple(samples[start : start + size])))
        start += size
    if start != len(samples):
        raise SavedRolloutError(f"{path}: groups of {start} samples in all, {len(samples)} are there")
    return SavedRollout(meta["rollout_id"], Origin(**meta["origin"]), meta["weights"], groups)


def _cut(path: Path, rows: Sequence[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Sample]:
    used = dict.fromkeys([*_PER_TOKEN, "routed_experts"], 0)

    def take(name: str, count: int) -> np.ndarray:
        start = used[name]
        used[name] += count
        part = arrays[name][start : used[name]]
        if len(part) != count:
            raise SavedRolloutError(f"{path}: {name} ends {count - len(part)} entries too early")
        return part

    samples = []
    for row in rows:
        length, response = row.pop("length"), row["response_length"]
        routes = take("routed_experts", length - 1) if row.pop("has_routes") else None
        counts = {name: length if name == "tokens" else response for name in _PER_TOKEN}
        fields = row | {name: take(name, count) for name, count in counts.items()}
        samples.append(Sample(**(fields | {"status": SampleStatus(row["status"]), "routed_experts": routes})))
    for name, array in arrays.items():
        if used[name] != len(array):
            raise SavedRolloutError(f"{path}: {name} has {len(array)} entries, the samples take {used[name]}")
    return samples


class SavedCollector:
    """Hands out saved rollouts in place of sampled ones; see `Collector`.

    Args:
        config: the run that trains on them.
        folder: of the files.
        origin: of the run's own model.
        weights: `weights_digest` of the model that training starts from.
    """

    def __init__(self, config: RunConfig, folder: Path, origin: Origin, weights: str) -> None:
        self._config, self._folder, self._origin, self._weights = config, folder, origin, weights
        self._next = 0

    def collect(self) -> tuple[list[SampleGroup], Metrics]:
        """The next rollout. Raises SavedRolloutError when it does not belong to this run."""
        path = rollout_file(self._folder, self._next)
        saved = load_rollout(path)
        self._check(path, saved)
        self._next += 1
        return saved.groups, rollout_metrics(saved.groups)

    def _check(self, path: Path, saved: SavedRollout) -> None:
        wanted: list[tuple[str, Any, Any]] = [("rollout_id", saved.rollout_id, self._next)]
        wanted += [(name, value, getattr(self._origin, name)) for name, value in asdict(saved.origin).items()]
        if self._next == 0:  # later weights are the result of training, which may be what is looked into
            wanted.append(("weights", saved.weights, self._weights))
        size = self._config.rollout.n_samples_per_prompt
        wanted.append(("group sizes", [len(g.samples) for g in saved.groups], [size] * self._config.rollout.batch_size))
        faults = [f"{name} {found}, this run has {own}" for name, found, own in wanted if found != own]
        if faults:
            raise SavedRolloutError(f"{path} does not belong to this run: {'; '.join(faults)}")

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
