"""Hugging Face folder -> torch_dist, tensor by tensor, on any machine: no GPU, no process group, little memory.

dst/
  hf/                                 config.json as converted, tokenizer, generation config, ...
    tensors.json                      the Hugging Face tensors that an export must write: name, shape, dtype
  release/                            the checkpoint (conversion/torch_dist_writer.py)
  latest_checkpointed_iteration.txt   "release"; written last
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conversion.disk import naming_full_disk, require_free_space
from conversion.families import geometry_from_config, left_out_names, rules_for
from conversion.finite import check_finite
from conversion.geometry import ModelGeometry
from conversion.mapping import ConversionError, Coverage, Rule, check_complete
from conversion.mtp import fresh_tensor, hf_mtp_layers, twin, with_mtp_layers
from conversion.quantization.dequantized import DequantizedFolder, open_checkpoint
from conversion.safetensors_header import TensorSpec, read_json
from conversion.safetensors_io import SafetensorsFolder, copy_side_files
from conversion.streaming import Progress, no_progress, run_ahead
from conversion.torch_dist_reader import RELEASE, TRACKER
from conversion.torch_dist_writer import TorchDistWriter

_Source = SafetensorsFolder | DequantizedFolder

HF_FOLDER = "hf"
TENSORS_FILE = "tensors.json"
_ENTRY_BYTES = 4096  # more than an entry takes besides its data, metadata included


@dataclass(frozen=True)
class _Plan:
    """What becomes of which tensor, all of it checked against the headers before a tensor is read."""

    config: dict[str, Any]  # as converted
    geometry: ModelGeometry
    rules: list[Rule]  # in the order of the source's files
    specs: dict[str, TensorSpec]  # the Hugging Face tensors of all rules, those of fresh layers included
    coverage: Coverage
    left_out: frozenset[str]  # Hugging Face names in the source that are not converted
    fresh: frozenset[str]  # Hugging Face names that the source lacks
    mtp_in_source: int
    quantized: int  # tensors that are decoded

    def nbytes(self, rule: Rule) -> int:
        return sum(self.specs[name].nbytes for name in rule.hf)


def hf_to_torch_dist(
    src: Path, dst: Path, *, mtp_num_layers: int | None = None, progress: Progress = no_progress
) -> dict[str, Any]:
    """Converts the checkpoint `src` into the new folder `dst`; a conversion that was killed starts anew.

    Args:
        mtp_num_layers: MTP layers to convert; None takes those that the checkpoint has, fewer leave the last ones out,
            and layers that it lacks are freshly initialised.

    Returns:
        The account: tensors in the source, converted, decoded, compared as copies, left out and fresh, bytes, formats,
        and `warnings` for people.

    Raises:
        CheckpointError: `src` is incomplete or damaged.
        QuantizationError: `src` is quantized in a format that is not supported.
        UnknownFamilyError, UnsupportedModelError: `src` is of a model that has no mapping.
        ConversionError: a tensor is missing, unknown, of a wrong shape, or not finite; names it.
        FileExistsError: `dst` holds a checkpoint.
        DiskFullError: `dst` has too little space.
    """
    with open_checkpoint(src) as source:
        plan = _plan(source, mtp_num_layers)
        if (dst / TRACKER).exists():
            raise FileExistsError(f"{dst} already holds a checkpoint; give a new folder")
        total = sum(plan.nbytes(rule) for rule in plan.rules)
        require_free_space(dst, total + _ENTRY_BYTES * len(plan.rules))
        shutil.rmtree(dst / RELEASE, ignore_errors=True)  # whole but not pointed to: killed between the two
        side_files = copy_side_files(src, dst / HF_FOLDER)
        _write_description(dst / HF_FOLDER, plan)

        read: Counter[str] = Counter()
        with TorchDistWriter(dst / RELEASE, plan.geometry) as writer:
            done = 0
            tensors = run_ahead(_jobs(plan, source, read))
            for rule, tensor in zip(plan.rules, tensors, strict=True):
                writer.write(rule.megatron, tensor)
                done += plan.nbytes(rule)
                progress(done, total, rule.megatron)
            _check_read_once(read, set(source.names) - plan.left_out)
    with naming_full_disk(dst / TRACKER):
        (dst / f"{TRACKER}.partial").write_text(RELEASE)
    (dst / f"{TRACKER}.partial").rename(dst / TRACKER)
    return _account(plan, side_files)


def check_shapes(rules: Iterable[Rule], specs: Mapping[str, TensorSpec]) -> None:
    """Raises `ConversionError` naming every Hugging Face tensor whose shape is not the one that the rules imply."""
    faults = [
        f"tensor {name} has shape {list(specs[name].shape)}, but config.json implies {list(shape)}"
        for rule in rules
        for name, shape in rule.hf_shapes().items()
        if name in specs and specs[name].shape != shape
    ]
    if faults:
        raise ConversionError("; ".join(faults))


def _plan(source: _Source, mtp_num_layers: int | None) -> _Plan:
    config = read_json(source.folder / "config.json")
    config.pop("quantization_config", None)  # quantized weights are decoded as they are read
    in_source = hf_mtp_layers(frozenset(source.names), geometry_from_config(config))
    wanted = in_source if mtp_num_layers is None else mtp_num_layers
    kept = min(in_source, wanted)
    config = with_mtp_layers(config, wanted)
    geometry = geometry_from_config(config)
    rules = rules_for(geometry, wanted)
    left_out = left_out_names(replace(geometry, mtp_num_layers=max(in_source, wanted)), wanted)
    left_out &= frozenset(source.names)
    coverage = check_complete(rules_for(geometry, kept), source.names, left_out)

    specs = {name: source.spec(name) for name in source.names if name not in left_out}
    check_shapes(rules, specs)
    fresh = left_out_names(geometry, kept)
    by_megatron = {rule.megatron: rule for rule in rules}
    for rule in rules:
        for name, shape in rule.hf_shapes().items():
            if name in fresh:
                like = rule if rule.hf[0] in specs else by_megatron[twin(rule.megatron, geometry)]
                specs[name] = TensorSpec(name, shape, specs[like.hf[0]].dtype, file="")
    position = {name: i for i, name in enumerate(specs)}
    rules.sort(key=lambda rule: position[rule.hf[0]])
    quantized = len(source.quantized - left_out) if isinstance(source, DequantizedFolder) else 0
    return _Plan(config, geometry, rules, specs, coverage, left_out, fresh, in_source, quantized)


def _jobs(plan: _Plan, source: _Source, read: Counter[str]) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
    present = frozenset(source.names)

    def read_finite(name: str) -> torch.Tensor:
        read[name] += 1
        return check_finite(name, source.read(name))

    for rule in plan.rules:
        if rule.hf[0] in plan.fresh:
            dtype = getattr(torch, plan.specs[rule.hf[0]].dtype)
            yield plan.nbytes(rule), partial(fresh_tensor, rule.megatron, rule.shape, dtype)
        else:
            yield plan.nbytes(rule), partial(rule.to_megatron, read_finite, present)


def _check_read_once(read: Counter[str], expected: set[str]) -> None:
    wrong = sorted(name for name in expected | read.keys() if read[name] != (name in expected))
    if wrong:
        raise ConversionError(f"tensors that were not read exactly once: {', '.join(wrong)}")


def _write_description(folder: Path, plan: _Plan) -> None:
    tensors = {name: {"dtype": spec.dtype, "shape": spec.shape} for name, spec in plan.specs.items()}
    for file, value in (("config.json", plan.config), (TENSORS_FILE, {"tensors": tensors})):
        with naming_full_disk(folder / file):
            (folder / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _account(plan: _Plan, side_files: list[str]) -> dict[str, Any]:
    converted = plan.geometry.mtp_num_layers
    fresh_layers = max(converted - plan.mtp_in_source, 0)
    warnings = []
    if fresh_layers:
        warnings.append(
            f"{fresh_layers} MTP layers are FRESHLY INITIALISED: the checkpoint has {plan.mtp_in_source} and "
            f"model.mtp_num_layers is {converted}; they predict nothing before they are trained"
        )
    if plan.left_out:
        warnings.append(
            f"{len(plan.left_out)} tensors of {plan.mtp_in_source - converted} MTP layers are left out: "
            f"the checkpoint has {plan.mtp_in_source} and model.mtp_num_layers is {converted}"
        )
    return {
        "architecture": plan.geometry.architecture,
        "tensors_in_source": plan.coverage.required + plan.coverage.copies + plan.coverage.left_out,
        "tensors_converted": plan.coverage.required,
        "tensors_dequantized": plan.quantized,
        "tensors_compared_as_copies": plan.coverage.copies,
        "tensors_left_out": plan.coverage.left_out,
        "layers_left_out": sorted({".".join(name.split(".")[:3]) for name in plan.left_out}),
        "mtp_in_source": plan.mtp_in_source,
        "mtp_converted": converted - fresh_layers,
        "mtp_initialised": fresh_layers,
        "megatron_tensors": len(plan.rules),
        "bytes": sum(plan.nbytes(rule) for rule in plan.rules),
        "dtypes": dict(sorted(Counter(plan.specs[rule.hf[0]].dtype for rule in plan.rules).items())),
        "side_files": side_files,
        "warnings": warnings,
    }
