"""torch_dist -> Hugging Face folder, ready to load: weights, config, tokenizer, generation config.

Any torch_dist checkpoint of the model will do, from the converter or from a training run of any parallel layout. What
torch_dist does not know comes from a reference folder: the `hf` folder of a converted checkpoint, or the original
Hugging Face folder. Its tensors fix the names, the shapes and the number format of each exported tensor.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conversion.disk import naming_full_disk, require_free_space
from conversion.families import geometry_from_config, left_out_names, rules_for
from conversion.finite import check_finite
from conversion.hf_to_torch_dist import TENSORS_FILE, check_shapes
from conversion.mapping import ConversionError, Rule
from conversion.mtp import hf_mtp_layers, megatron_mtp_layers, with_mtp_layers
from conversion.quantization.dequantized import open_checkpoint
from conversion.safetensors_header import ITEM_SIZES, TensorSpec, read_json
from conversion.safetensors_io import SafetensorsWriter, copy_side_files
from conversion.streaming import Progress, no_progress, run_ahead
from conversion.torch_dist_reader import TorchDistFolder

# Training may pad these to rows that divide among tensor-parallel ranks; no token has the padding's ids.
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class _Plan:
    config: dict[str, Any]  # as exported
    rules: list[Rule]  # in the order of the reference's tensors
    specs: dict[str, TensorSpec]  # every tensor to write, in its exported number format
    left_out: int  # tensors of the reference whose MTP layers the checkpoint lacks


def torch_dist_to_hf(
    src: Path,
    reference_hf: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Exports the checkpoint `src` to the new folder `dst`; an export that was killed starts anew.

    Args:
        src: a torch_dist folder, or one with a tracker file that points to it.
        reference_hf: where config, tokenizer and the number format of each tensor come from.
        dtype: torch's name of another number format for the tensors in the model's main one, which is that of the
            embedding; what the reference keeps in another format (a fp32 router) stays so.

    Returns:
        The account: tensors read and written, casts, dropped padding, bytes, MTP layers, and `warnings` for people.

    Raises:
        CheckpointError: `src` or `reference_hf` is incomplete or damaged.
        ConversionError: the two are not of one model, or a value is not finite; names the tensors.
        FileExistsError: `dst` holds weights.
        DiskFullError: `dst` has too little space.
    """
    if dtype is not None and dtype not in ITEM_SIZES:
        raise ValueError(f"dtype {dtype!r} is unknown, it must be one of {', '.join(ITEM_SIZES)}")
    checkpoint = TorchDistFolder(src)
    plan = _plan(checkpoint, reference_hf, dtype)
    total = sum(spec.nbytes for spec in plan.specs.values())
    require_free_space(dst, total)
    casts: Counter[str] = Counter()
    with SafetensorsWriter(dst, max_shard_bytes) as writer:
        side_files = copy_side_files(reference_hf, dst, leave=(TENSORS_FILE,))
        with naming_full_disk(dst / "config.json"):
            (dst / "config.json").write_text(json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n")
        done = 0
        jobs = [
            (sum(plan.specs[name].nbytes for name in rule.hf), partial(_export, rule, checkpoint, plan.specs))
            for rule in plan.rules
        ]
        for rule, (tensors, source_dtype) in zip(plan.rules, run_ahead(jobs), strict=True):
            for name, tensor in tensors.items():
                writer.write(name, tensor)
                done += tensor.nbytes
                if source_dtype != plan.specs[name].dtype:
                    casts[f"{source_dtype} to {plan.specs[name].dtype}"] += 1
            progress(done, total, rule.megatron)
        written = writer.names
        if written != plan.specs.keys():
            raise ConversionError(f"tensors that were not written: {', '.join(sorted(plan.specs.keys() - written))}")
    return _account(plan, checkpoint, casts, side_files)


def _plan(checkpoint: TorchDistFolder, reference: Path, dtype: str | None) -> _Plan:
    mtp = megatron_mtp_layers(checkpoint.names)
    config = with_mtp_layers(read_json(reference / "config.json"), mtp)
    config.pop("quantization_config", None)
    geometry = geometry_from_config(config)
    rules = rules_for(geometry, mtp)
    check_same_model(rules, checkpoint)

    described = _described_tensors(reference)
    most_mtp = max(hf_mtp_layers(frozenset(described), geometry), mtp)
    left_out = left_out_names(replace(geometry, mtp_num_layers=most_mtp), mtp) & described.keys()
    specs = {name: spec for name, spec in described.items() if name not in left_out}
    _check_described(rules, specs, reference)
    if dtype is not None:
        main = specs[rules[0].hf[0]].dtype
        specs = {n: replace(spec, dtype=dtype) if spec.dtype == main else spec for n, spec in specs.items()}
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    position = {name: i for i, name in enumerate(specs)}
    rules.sort(key=lambda rule: position[rule.hf[0]])
    return _Plan(config, rules, specs, len(left_out))


def _described_tensors(reference: Path) -> dict[str, TensorSpec]:
    """Hugging Face tensors that the reference folder describes: those of tensors.json, or its own."""
    if not (reference / TENSORS_FILE).is_file():
        with open_checkpoint(reference) as folder:
            return {name: folder.spec(name) for name in folder.names}
    tensors = read_json(reference / TENSORS_FILE)["tensors"]
    return {name: TensorSpec(name, tuple(t["shape"]), t["dtype"], file="") for name, t in tensors.items()}


def check_same_model(rules: list[Rule], checkpoint: TorchDistFolder) -> None:
    """Raises `ConversionError` naming every tensor that is missing, unknown or of another shape than the rules say."""
    expected = {rule.megatron: rule.shape for rule in rules}
    found = set(checkpoint.names)
    faults = {
        "missing from the checkpoint": sorted(expected.keys() - found),
        "in the checkpoint, but not of this model": sorted(found - expected.keys()),
        "of another shape than the model's config implies": [
            f"{name} {list(checkpoint.spec(name).shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and not _fits(name, checkpoint.spec(name).shape, shape)
        ],
    }
    _raise_faults(f"{checkpoint.folder} and its reference are not of one model", faults)


def _fits(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return found == expected or (name in _PADDED and found[0] > expected[0] and found[1:] == expected[1:])


def _check_described(rules: list[Rule], specs: dict[str, TensorSpec], reference: Path) -> None:
    required = {name for rule in rules for name in rule.hf}
    optional = {name for rule in rules for name in rule.optional_hf}
    faults = {
        "of the checkpoint are not described by the reference": sorted(required - specs.keys()),
        "of the reference have no source in the checkpoint": sorted(specs.keys() - required - optional),
    }
    _raise_faults(f"{reference} does not describe this checkpoint; take the `hf` folder that was made with it", faults)
    check_shapes(rules, specs)


def _raise_faults(what: str, faults: dict[str, list[str]]) -> None:
    if any(faults.values()):
        listed = (f"{len(names)} tensors {fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise ConversionError(f"{what}: {'; '.join(listed)}")


def _export(
    rule: Rule, checkpoint: TorchDistFolder, specs: dict[str, TensorSpec]
) -> tuple[dict[str, torch.Tensor], str]:
    """The rule's Hugging Face tensors as they are written, and the number format that the checkpoint had."""
    whole = checkpoint.read(rule.megatron)[: rule.shape[0]]
    tensors = {
        name: check_finite(name, tensor.to(getattr(torch, specs[name].dtype)))
        for name, tensor in rule.to_hf(whole, specs.keys()).items()
    }
    return tensors, checkpoint.spec(rule.megatron).dtype


def _account(plan: _Plan, checkpoint: TorchDistFolder, casts: Counter[str], side_files: list[str]) -> dict[str, Any]:
    padding = {
        rule.megatron: checkpoint.spec(rule.megatron).shape[0] - rule.shape[0]
        for rule in plan.rules
        if rule.megatron in _PADDED
    }
    warnings = []
    if plan.left_out:
        warnings.append(f"{plan.left_out} tensors of MTP layers that the checkpoint lacks are not exported")
    return {
        "architecture": geometry_from_config(plan.config).architecture,
        "megatron_tensors": len(plan.rules),
        "tensors_written": len(plan.specs),
        "tensors_left_out": plan.left_out,
        "mtp_converted": megatron_mtp_layers(checkpoint.names),
        "casts": dict(sorted(casts.items())),
        "padding_rows_dropped": {name: rows for name, rows in padding.items() if rows},
        "bytes": sum(spec.nbytes for spec in plan.specs.values()),
        "dtypes": dict(sorted(Counter(spec.dtype for spec in plan.specs.values()).items())),
        "side_files": side_files,
        "warnings": warnings,
    }
