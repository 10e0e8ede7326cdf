"""Tiny Hugging Face models of each family, converted once a session, and training samples for them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from conversion.families import geometry_from_config
from conversion.geometry import ModelGeometry
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.random_model import make_random_model
from conversion.safetensors_io import SafetensorsFolder
from miles_core.config.run import RunConfig
from miles_core.types import TrainSample
from miles_core.weight_sync.bucket import tensor_digest

_COMMON = {
    "vocab_size": 101,  # no multiple of anything
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # far from uniform output distributions
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_GROUPED = _MOE | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_QWEN3_MOE = _MOE | {"head_dim": 16, "num_experts": 8}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-3-layers": ("LlamaForCausalLM", {"num_hidden_layers": 3}),
    "llama-biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "LlamaForCausalLM",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-sliding": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-yarn": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _QWEN3_MOE),
    "qwen3-moe-unnormalized": ("Qwen3MoeForCausalLM", _QWEN3_MOE | {"norm_topk_prob": False}),
    "glm4-moe": ("Glm4MoeForCausalLM", _GROUPED | {"head_dim": 16, "use_qk_norm": True, "num_hidden_layers": 4}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        _GROUPED
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3ForCausalLM",
        _GROUPED
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 20, "tie_word_embeddings": True},
    ),
}


# Shared by all tests of a process, gone when it ends.
_FOLDERS = TemporaryDirectory(prefix="miles-models-")


@cache
def hf_folder(name: str) -> Path:
    """A model of transformers' own class with random weights, biases and norms too; `NAME+mtp` with an MTP layer."""
    folder = Path(_FOLDERS.name, name)
    folder.mkdir()
    if name == "glm4-moe-mtp":
        make_random_model(
            folder,
            num_layers=2,
            num_dense_layers=1,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            ffn_hidden_size=96,
            num_experts=8,
            top_k=2,
            moe_ffn_hidden_size=32,
            num_mtp_layers=1,
            max_position=128,
            seed=0,
        )
        return folder
    base, _, mtp = name.partition("+")
    architecture, settings = MODELS[base]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**(_COMMON | settings))
    config.num_hidden_layers += bool(mtp)
    torch.manual_seed(0)
    model = model_class(config).float()
    for parameter_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if parameter_name.endswith(("norm.weight", "bias", "layernorm.weight")):
            tensor.data += 0.3 * torch.randn(tensor.shape)
    model.save_pretrained(folder)
    if mtp:
        _make_last_layer_mtp(folder)
    return folder


def _make_last_layer_mtp(folder: Path) -> None:
    """The checkpoint's last decoder layer becomes the one inside an MTP layer, whose other tensors are added."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": config["num_hidden_layers"] - 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, hidden = load_file(folder / "model.safetensors"), config["hidden_size"]
    layer = f"model.layers.{config['num_hidden_layers']}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}.{norm}.weight"] = 1 + 0.3 * torch.randn(hidden)
    tensors[f"{layer}.eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@cache
def checkpoint_folder(name: str) -> Path:
    """The model of `hf_folder`, converted to torch_dist."""
    folder = Path(_FOLDERS.name, f"{name}-torch-dist")
    hf_to_torch_dist(hf_folder(name), folder)
    return folder


def folder_digests(name: str) -> dict[str, str]:
    """sha256 of each tensor in `hf_folder`."""
    with SafetensorsFolder(hf_folder(name)) as folder:
        return {tensor: tensor_digest(folder.read(tensor)) for tensor in folder.names}


def geometry_of(name: str) -> ModelGeometry:
    """As the conversion describes the model."""
    return geometry_from_config(json.loads((checkpoint_folder(name) / "hf" / "config.json").read_text()))


def run_config(name: str, *, samples: int, **sections: dict[str, Any]) -> RunConfig:
    """A run whose optimizer steps take `samples` samples, in fp32."""
    trainer = {
        "precision": "fp32",
        "micro_batch_size": samples,
        "routing_replay": False,
        "optimizer": {"lr": 1e-3},
    } | sections.pop("trainer", {})
    return RunConfig.model_validate(
        {
            "model": {"path": str(hf_folder(name))},
            "data": {"task": {}},
            "rollout": {
                "batch_size": samples,
                "n_samples_per_prompt": 1,
                "sampling": {"max_new_tokens": 8, "temperature": 0.7},
            },
            "trainer": trainer,
            **sections,
        }
    )


def make_samples(name: str, count: int, *, seed: int = 0, with_routes: bool = False) -> list[TrainSample]:
    """Samples of ragged lengths, some tokens masked, weighted as a mean over tokens. None has token 0, the padding."""
    geometry, rng = geometry_of(name), np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 7)), int(rng.integers(1, 9))
        routes = None
        if with_routes:
            assert geometry.moe is not None
            order = rng.random((prompt + response - 1, geometry.num_layers, geometry.moe.num_experts)).argsort(-1)
            routes = order[..., : geometry.moe.top_k].astype(np.int16)
        samples.append(
            TrainSample(
                index=100 + i,
                tokens=rng.integers(1, geometry.vocab_size, prompt + response).astype(np.int32),
                response_length=response,
                loss_mask=(rng.random(response) < 0.8).astype(np.uint8),
                loss_weights=np.zeros(response, dtype=np.float32),
                advantages=np.full(response, rng.normal(), dtype=np.float32),
                rollout_log_probs=rng.normal(-4, 0.5, response).astype(np.float32),
                routed_experts=routes,
            )
        )
    trained = sum(int(s.loss_mask.sum()) for s in samples)
    return [replace(s, loss_weights=(s.loss_mask / trained).astype(np.float32)) for s in samples]
