"""Rotary frequencies as config.json describes them. megatron-core knows one set of Llama 3 constants only."""

import math

import torch
from torch import Tensor

from conversion.geometry import RopeGeometry


def inverse_frequencies(rope: RopeGeometry) -> Tensor:
    """Angle per position of each pair of dims, float32 [rotary_dim / 2]: theta^(-2i / rotary_dim), scaled.

    linear: divided by `factor` (Chen et al., arXiv 2306.15595). llama3: wavelengths beyond the original context are
    divided by `factor`, short ones kept, those between interpolated (Llama 3.1 model card and reference code).
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "default":
        return frequencies
    slowed = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slowed
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * slowed + kept * frequencies
