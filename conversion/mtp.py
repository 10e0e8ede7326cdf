"""Multi-token-prediction layers: how many a checkpoint has, how many its config promises, and fresh ones."""

import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from conversion.families import UnsupportedModelError, geometry_from_config
from conversion.geometry import ModelGeometry
from conversion.mapping import ConversionError

_CONFIG_KEY, _CONFIG_ALIAS = "num_nextn_predict_layers", "num_mtp_layers"
_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
_STD = 0.02  # of fresh weights, megatron-core's default init_method_std


def hf_mtp_layers(names: Collection[str], geometry: ModelGeometry) -> int:
    """Number of MTP layers among the Hugging Face names of a checkpoint.

    config.json does not tell: transformers drops these layers when it loads and saves a model, and keeps their number.
    """
    count = 0
    while any(
        f"model.layers.{geometry.num_layers + count}.{part}.weight" in names for part in ("enorm", "hnorm", "eh_proj")
    ):
        count += 1
    return count


def megatron_mtp_layers(names: Iterable[str]) -> int:
    """Number of MTP layers among Megatron names."""
    return max((int(found[1]) + 1 for name in names if (found := _MTP_LAYER.match(name))), default=0)


def with_mtp_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """config.json of the same model with `count` MTP layers.

    Raises `ConversionError` where the family has no place for them.
    """
    if geometry_from_config(config).mtp_num_layers == count:
        return dict(config)
    changed = {key: value for key, value in config.items() if key != _CONFIG_ALIAS} | {_CONFIG_KEY: count}
    try:
        possible = geometry_from_config(changed).mtp_num_layers == count
    except UnsupportedModelError:
        possible = False
    if not possible:
        architecture = geometry_from_config(config).architecture
        raise ConversionError(
            f"model.mtp_num_layers is {count}, but {architecture} has no MTP layers; set model.mtp_num_layers = 0"
        )
    return changed


def twin(name: str, geometry: ModelGeometry) -> str:
    """The tensor of the decoder proper that an MTP tensor is like, for the number format of a fresh one."""
    rest = _MTP_LAYER.sub("", name)
    if rest.startswith("transformer_layer."):
        return f"decoder.layers.{geometry.num_layers - 1}.{rest.removeprefix('transformer_layer.')}"
    return "embedding.word_embeddings.weight" if rest == "eh_proj.weight" else "decoder.final_layernorm.weight"


def fresh_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Initial values of an MTP tensor, as megatron-core would draw them; equal for equal names and shapes."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(std=_STD, generator=generator).to(dtype)
