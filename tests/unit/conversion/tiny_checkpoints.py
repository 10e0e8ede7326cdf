"""Tiny Hugging Face folders with random values in every tensor, norms and biases included, so that any mix-up shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import saved_config

from conversion.families import geometry_from_config, rules_for
from conversion.mapping import Rule
from conversion.safetensors_io import SafetensorsFolder, SafetensorsWriter

Tensors = dict[str, torch.Tensor]


def write_checkpoint(
    folder: Path,
    name: str,
    *,
    change: Callable[[Tensors], object] = lambda tensors: None,
    max_shard_bytes: int = 100_000,
    **config_changes: Any,
) -> Path:
    """A bf16 model of `tiny_models` with fp32 routers, in several shards; `change` may damage the tensors first."""
    config = saved_config(name) | config_changes
    geometry = geometry_from_config(config)
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(0)
    for rule in rules_for(geometry, geometry.mtp_num_layers):
        for hf, shape in zip(rule.hf, rule.op.hf_shapes(rule.shape), strict=True):
            dtype = torch.float32 if ".mlp.gate." in hf else torch.bfloat16
            tensors[hf] = torch.randn(shape, generator=generator).to(dtype)
        copies = [copy for copy in rule.optional_hf if copy != "lm_head.weight"]  # tied: as transformers saves it
        tensors |= {copy: tensors[rule.hf[0]].clone() for copy in copies}
    change(tensors)
    write_folder(folder, config, tensors, max_shard_bytes)
    return folder


def write_folder(folder: Path, config: dict, tensors: Tensors, max_shard_bytes: int = 100_000) -> None:
    folder.mkdir(parents=True)
    files = {"config.json": config, "generation_config.json": {"eos_token_id": 2}, "tokenizer.json": {"é": "ü"}}
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    with SafetensorsWriter(folder, max_shard_bytes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def read_tensors(folder: Path) -> Tensors:
    with SafetensorsFolder(folder) as opened:
        return {name: opened.read(name) for name in opened.names}


def megatron_tensors(folder: Path) -> tuple[list[Rule], Tensors]:
    """The rules of a folder, and its whole Megatron tensors made by them, in memory."""
    geometry = geometry_from_config(json.loads((folder / "config.json").read_text()))
    rules = rules_for(geometry, geometry.mtp_num_layers)
    tensors = read_tensors(folder)
    return rules, {rule.megatron: rule.to_megatron(tensors.__getitem__, tensors) for rule in rules}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
