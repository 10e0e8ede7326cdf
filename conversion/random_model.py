"""A small GLM-4.5-type model with random weights, written as a complete Hugging Face folder.

It has every part that conversion, routing replay and speculative decoding must handle: a dense first layer, routed
experts with a correction bias, a shared expert, and MTP layers stored as further layers of the checkpoint.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conversion.character_tokenizer import EOS_ID, PAD_ID, VOCABULARY, write_character_tokenizer
from conversion.families import geometry_from_config, rules_for
from conversion.safetensors_io import SafetensorsWriter

if TYPE_CHECKING:
    import torch

_STD = 0.02  # of the initial weights


@dataclass(frozen=True)
class RandomModel:
    """Shape and seed; the fields of miles_core's RandomModelConfig."""

    num_layers: int
    num_dense_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    moe_ffn_hidden_size: int
    num_mtp_layers: int
    max_position: int
    seed: int


def make_random_model(out: Path, **fields: int) -> dict[str, int]:
    """Write config, generation config, fp32 weights and tokenizer to the new or empty folder `out`.

    `fields` are those of RandomModel; equal ones give the same bytes. Weights are normal with standard deviation 0.02,
    norms 1, biases 0.

    Returns:
        The account: number of tensors, of parameters (shared ones once), of bytes of the weights, and of MTP layers.

    Raises:
        UnsupportedModelError: the shape is impossible.
        FileExistsError: `out` holds weights already.
    """
    import torch

    model = RandomModel(**fields)
    config = random_config(model)
    geometry = geometry_from_config(config)
    rules = rules_for(geometry, model.num_mtp_layers)
    generator = torch.Generator().manual_seed(model.seed)

    with SafetensorsWriter(out) as writer:
        for rule in rules:
            shapes = zip(rule.hf, rule.op.hf_shapes(rule.shape), strict=True)
            tensors = {name: _initial(name, shape, generator) for name, shape in shapes}
            copies = dict.fromkeys(rule.optional_hf, tensors[rule.hf[0]])
            for name, tensor in (tensors | copies).items():
                writer.write(name, tensor)
    write_character_tokenizer(out, model.max_position)
    _write_json(out / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    _write_json(out / "config.json", config)
    return {
        "tensors": sum(len(rule.hf_shapes()) for rule in rules),
        "parameters": sum(math.prod(rule.shape) for rule in rules),
        "bytes": writer.total_size,
        "mtp_layers": model.num_mtp_layers,
    }


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape)
    return torch.empty(shape).normal_(std=_STD, generator=generator)


def random_config(model: RandomModel) -> dict[str, Any]:
    """config.json of the model, before it is written. Needs no torch."""
    # Rope in the older keys, which all versions of transformers and of the serving engines read.
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "eos_token_id": EOS_ID,
        "first_k_dense_replace": model.num_dense_layers,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": _STD,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "n_group": 1,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": model.num_heads,
        "num_experts_per_tok": model.top_k,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "num_nextn_predict_layers": model.num_mtp_layers,
        "pad_token_id": PAD_ID,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": len(VOCABULARY),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
