"""What a checkpoint holds, how two differ, and whether one is whole: behind `miles checkpoint inspect|diff|verify`.

Hugging Face and torch_dist folders alike, each under its own tensor names, one tensor in memory at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from conversion.families import UnknownFamilyError, UnsupportedModelError, geometry_from_config, rules_for
from conversion.finite import nonfinite_counts
from conversion.hf_to_torch_dist import HF_FOLDER, check_shapes
from conversion.mapping import ConversionError, Shape, check_complete
from conversion.mtp import hf_mtp_layers, megatron_mtp_layers, with_mtp_layers
from conversion.quantization.dequantized import open_checkpoint
from conversion.quantization.formats import QuantizationError
from conversion.safetensors_header import CheckpointError, read_json
from conversion.safetensors_io import SafetensorsFolder
from conversion.streaming import Progress, no_progress, run_ahead
from conversion.torch_dist_reader import TRACKER, TorchDistFolder
from conversion.torch_dist_to_hf import check_same_model

Kind = Literal["Hugging Face", "torch_dist"]


@dataclass(frozen=True)
class TensorStats:
    """One tensor; `norm` is Euclidean, NaN or infinite where a value is."""

    name: str
    shape: Shape
    dtype: str
    nbytes: int
    norm: float
    nan: int
    inf: int


@dataclass(frozen=True)
class Inspection:
    """All tensors of a checkpoint, in its order."""

    folder: Path
    kind: Kind
    tensors: tuple[TensorStats, ...]

    @property
    def parameters(self) -> int:
        """Values in all tensors; copies that a file repeats count each time."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """Number of tensors of each dtype."""
        return dict(sorted(Counter(tensor.dtype for tensor in self.tensors).items()))

    @property
    def nonfinite(self) -> tuple[TensorStats, ...]:
        """Tensors that hold NaN or infinity."""
        return tuple(tensor for tensor in self.tensors if tensor.nan or tensor.inf)


@dataclass(frozen=True)
class DiffRow:
    """One name in two checkpoints; None where a side lacks it."""

    name: str
    left: TensorStats | None
    right: TensorStats | None
    equal: bool  # dtype, shape and every bit
    max_abs_diff: float | None  # None where shapes differ or a side is absent


@dataclass(frozen=True)
class Diff:
    """Two checkpoints side by side: the names of the left in its order, then those of the right alone."""

    rows: tuple[DiffRow, ...]

    @property
    def different(self) -> tuple[DiffRow, ...]:
        return tuple(row for row in self.rows if not row.equal)

    @property
    def exit_code(self) -> int:
        """As of diff(1): 0 equal, 1 different."""
        return int(bool(self.different))


@dataclass(frozen=True)
class Verification:
    """Every fault found; an empty list means complete, consistent with its config, and finite."""

    folder: Path
    kind: Kind
    tensors: int
    faults: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 without faults, 1 with any."""
        return int(bool(self.faults))


def kind_of(folder: Path) -> Kind:
    """Raises `CheckpointError` for a folder that is neither."""
    if (folder / TRACKER).is_file() or (folder / "metadata.json").is_file():
        return "torch_dist"
    if (folder / "config.json").is_file():
        return "Hugging Face"
    raise CheckpointError(
        f"{folder} is no checkpoint: a Hugging Face folder has config.json, a torch_dist one metadata.json or {TRACKER}"
    )


def inspect_checkpoint(folder: Path, progress: Progress = no_progress) -> Inspection:
    """Names, shapes, dtypes, norms and non-finite counts. Raises `CheckpointError` for an incomplete folder."""
    kind, opened = kind_of(folder), _open(folder)

    def read_stats(name: str) -> TensorStats:
        return _stats(name, opened.read(name))

    jobs = [(opened.spec(name).nbytes, partial(read_stats, name)) for name in opened.names]
    done, tensors = 0, []
    for stats in run_ahead(jobs):
        tensors.append(stats)
        done += stats.nbytes
        progress(done, opened.total_bytes, stats.name)
    return Inspection(folder, kind, tuple(tensors))


def diff_checkpoints(left: Path, right: Path, progress: Progress = no_progress) -> Diff:
    """Compares two checkpoints of one kind, tensor by tensor and bit by bit.

    Raises `CheckpointError` for an incomplete folder, and for two of different kinds, whose names have no common form.
    """
    if kind_of(left) != kind_of(right):
        raise CheckpointError(
            f"{left} is a {kind_of(left)} checkpoint and {right} a {kind_of(right)} one: convert one of them first"
        )
    a, b = _open(left), _open(right)
    in_a, in_b = dict.fromkeys(a.names), dict.fromkeys(b.names)
    names = list(in_a | in_b)
    sizes = [sum(side.spec(name).nbytes for side, has in ((a, in_a), (b, in_b)) if name in has) for name in names]

    def compare(name: str) -> DiffRow:
        return _compare(name, a.read(name) if name in in_a else None, b.read(name) if name in in_b else None)

    done, rows = 0, []
    jobs = [(size, partial(compare, name)) for size, name in zip(sizes, names, strict=True)]
    for size, row in zip(sizes, run_ahead(jobs), strict=True):
        rows.append(row)
        done += size
        progress(done, sum(sizes), row.name)
    return Diff(tuple(rows))


def verify_checkpoint(folder: Path, progress: Progress = no_progress) -> Verification:
    """Whether a checkpoint is complete, has the tensors and shapes that its config implies, and is finite.

    The config of a torch_dist checkpoint is that in the `hf` folder beside it; one without is checked for the rest.
    """
    kind = kind_of(folder)
    try:
        inspection = inspect_checkpoint(folder, progress)
    except CheckpointError as error:
        return Verification(folder, kind, 0, (str(error),))
    faults = _model_faults(folder, kind)
    faults += [f"tensor {t.name} holds {t.nan} NaN and {t.inf} infinite values" for t in inspection.nonfinite]
    return Verification(folder, kind, len(inspection.tensors), tuple(faults))


def _open(folder: Path) -> SafetensorsFolder | TorchDistFolder:
    return SafetensorsFolder(folder) if kind_of(folder) == "Hugging Face" else TorchDistFolder(folder)


def _stats(name: str, tensor: torch.Tensor) -> TensorStats:
    nan, inf = nonfinite_counts(tensor)
    values = tensor if tensor.is_floating_point() and tensor.itemsize > 1 else tensor.float()
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorStats(name, tuple(tensor.shape), dtype, tensor.nbytes, norm, nan, inf)


def _compare(name: str, left: torch.Tensor | None, right: torch.Tensor | None) -> DiffRow:
    equal, distance = False, None
    if left is not None and right is not None and left.shape == right.shape:
        equal = left.dtype == right.dtype and torch.equal(_bytes(left), _bytes(right))
        distance = 0.0 if equal or not left.numel() else float((left.float() - right.float()).abs().max())
    stats = [None if tensor is None else _stats(name, tensor) for tensor in (left, right)]
    return DiffRow(name, stats[0], stats[1], equal, distance)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _model_faults(folder: Path, kind: Kind) -> list[str]:
    """Faults against the model's config."""
    try:
        if kind == "Hugging Face":
            _check_hf(folder)
        else:
            _check_torch_dist(TorchDistFolder(folder))
    except (ConversionError, QuantizationError, UnknownFamilyError, UnsupportedModelError) as error:
        return [str(error)]
    return []


def _check_hf(folder: Path) -> None:
    config = read_json(folder / "config.json")
    with open_checkpoint(folder) as source:
        layers = hf_mtp_layers(frozenset(source.names), geometry_from_config(config))
        rules = rules_for(geometry_from_config(with_mtp_layers(config, layers)), layers)
        check_complete(rules, source.names)
        check_shapes(rules, {name: source.spec(name) for name in source.names})


def _check_torch_dist(checkpoint: TorchDistFolder) -> None:
    config = checkpoint.folder.parent / HF_FOLDER / "config.json"
    if config.is_file():
        layers = megatron_mtp_layers(checkpoint.names)
        geometry = geometry_from_config(with_mtp_layers(read_json(config), layers))
        check_same_model(rules_for(geometry, layers), checkpoint)
