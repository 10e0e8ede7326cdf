"""Frequencies of rotary position embeddings (Su et al. 2104.09864), with the extensions to longer contexts.

One reading of config.json's rope scaling, for the trainer and for the embedded engine.
"""

import math
from typing import Any

import torch

from conversion.geometry import RopeGeometry


def rope_frequencies(rope: RopeGeometry) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dims, float32 [rotary_dim / 2], and a factor on cosines and sines.

    Plain: theta^(-2i / rotary_dim). linear: divided by `factor` (Chen et al. 2306.15595).

    Raises:
        ValueError: a kind of scaling that is not known.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling or {}
    match scaling.get("rope_type", "default"):
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / scaling["factor"], 1.0
        case "llama3":
            return _llama3(frequencies, scaling), 1.0
        case "yarn":
            return _yarn(frequencies, rope, scaling)
        case unknown:
            raise ValueError(f"rope_type {unknown!r} of config.json: supported: linear, llama3, yarn")


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def _yarn(frequencies: torch.Tensor, rope: RopeGeometry, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over the dims instead of over the wave lengths."""
    factor, half = scaling["factor"], rope.rotary_dim // 2

    def dim_that_turns(times: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return rope.rotary_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_that_turns(scaling.get("beta_fast") or 32), dim_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    slowed = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return slowed * frequencies / factor + (1 - slowed) * frequencies, _yarn_scale(scaling)


def _yarn_scale(scaling: dict[str, Any]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return given
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(scaling["factor"], mscale) / _mscale(scaling["factor"], mscale_all_dim)
    return _mscale(scaling["factor"], 1.0)


def _mscale(factor: float, mscale: float) -> float:
    """Growth of the attention logits with the context, equation 22 of YaRN."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
