"""Model families by exact architecture name. To add one: docs/adding-a-model-family.md."""

from collections.abc import Mapping
from typing import Any

from conversion.families.config_reader import ConfigReader, UnsupportedModelError
from conversion.families.decoder import decoder_rules
from conversion.families.deepseek_v3 import DEEPSEEK_V3
from conversion.families.family import Family
from conversion.families.gemma import GEMMA2, GEMMA3
from conversion.families.glm4_moe import GLM4_MOE
from conversion.families.llama import LLAMA, MISTRAL
from conversion.families.minimax_m2 import MINIMAX_M2
from conversion.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from conversion.geometry import ModelGeometry
from conversion.mapping import Rule

__all__ = [
    "FAMILIES",
    "UnknownFamilyError",
    "UnsupportedModelError",
    "geometry_from_config",
    "left_out_names",
    "rules_for",
]

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, MINIMAX_M2, GEMMA2, GEMMA3)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}


class UnknownFamilyError(ValueError):
    """No family for the architecture of a config.json."""


def geometry_from_config(config: Mapping[str, Any]) -> ModelGeometry:
    """The shape of the model that a config.json describes.

    Raises:
        UnknownFamilyError: its architecture is not in FAMILIES.
        UnsupportedModelError: it asks for what its family cannot represent; lists all such values.
    """
    family = _family_of(config)
    reader = ConfigReader(config, family.architecture)
    geometry = family.read(reader)
    reader.finish()
    return geometry


def rules_for(geometry: ModelGeometry, mtp_num_layers: int) -> list[Rule]:
    """Rules for every tensor of the model, each tensor once, with its first `mtp_num_layers` MTP layers.

    Raises:
        ValueError: `mtp_num_layers` is not among 0 ... geometry.mtp_num_layers.
    """
    if not 0 <= mtp_num_layers <= geometry.mtp_num_layers:
        raise ValueError(
            f"model.mtp_num_layers is {mtp_num_layers}, it must be between 0 and {geometry.mtp_num_layers}, the "
            f"number that config.json of this {geometry.architecture} gives"
        )
    return decoder_rules(geometry, FAMILIES[geometry.architecture].hf_names, mtp_num_layers)


def left_out_names(geometry: ModelGeometry, mtp_num_layers: int) -> frozenset[str]:
    """Hugging Face names of the MTP layers beyond the first `mtp_num_layers`, copies of shared tensors included."""

    def names(layers: int) -> set[str]:
        return {name for rule in rules_for(geometry, layers) for name in rule.hf + rule.optional_hf}

    return frozenset(names(geometry.mtp_num_layers) - names(mtp_num_layers))


def _family_of(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures") or []
    if not architectures:  # some tools leave it out
        by_type = [family for family in FAMILIES.values() if family.model_type == config.get("model_type")]
        if by_type:
            return by_type[0]
    elif len(architectures) == 1 and architectures[0] in FAMILIES:
        return FAMILIES[architectures[0]]
    found = " and ".join(architectures) or f"model_type {config.get('model_type')!r} without architectures"
    raise UnknownFamilyError(
        f"no model family for {found} in config.json of model.path; known: {', '.join(sorted(FAMILIES))}. "
        f"To add a family see docs/adding-a-model-family.md"
    )
