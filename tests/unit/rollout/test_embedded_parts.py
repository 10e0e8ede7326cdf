"""Parts of the embedded decoder that small whole models don't reach."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conversion.families import geometry_from_config
from conversion.geometry import MoeGeometry, RopeGeometry
from miles_core.rollout.embedded.moe import MixtureOfExperts, Router
from miles_core.rollout.embedded.prompts import padded_batches
from miles_core.rollout.embedded.rope import RopeTable

LENGTH = 200


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    ],
    ids=str,
)
def test_rope_equals_transformers(parameters: dict[str, Any]) -> None:
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters = parameters | {"original_max_position_embeddings": 64}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 1000.0} | parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    table = RopeTable(geometry_from_config(config.to_dict()).rope, LENGTH, torch.device("cpu"))
    torch.testing.assert_close(table.cos, cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(table.sin[:, 16:], sin[0, :, 16:], atol=2e-5, rtol=0)
    torch.testing.assert_close(table.sin[:, :16], -sin[0, :, :16], atol=2e-5, rtol=0)


def test_unknown_rope_scaling_is_refused() -> None:
    rope = RopeGeometry(theta=1e4, rotary_dim=8, scaling={"rope_type": "longrope"})
    with pytest.raises(ValueError, match="'longrope'"):
        RopeTable(rope, 4, torch.device("cpu"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_depends_on_distance_alone_and_leaves_the_rest(interleaved: bool) -> None:
    table = RopeTable(RopeGeometry(theta=100.0, rotary_dim=8, interleaved=interleaved), 50, torch.device("cpu"))
    q, k = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 7, 30])
    rotated = []
    for x, at in ((q, positions + 5), (k, positions)):
        x = x.expand(3, 1, 12).clone()
        table.at(at).apply_(x)
        torch.testing.assert_close(x[:, 0, 8:], (q if at is not positions else k)[8:].expand(3, 4))
        rotated.append(x)
    products = (rotated[0] * rotated[1]).sum(dim=-1).squeeze(1)
    torch.testing.assert_close(products, products[:1].expand(3), atol=1e-4, rtol=1e-4)
    assert abs(products[0] - (q * k).sum()) > 1e-2  # and does depend on it


def moe(num_experts: int, top_k: int, **options: Any) -> MoeGeometry:
    defaults: dict[str, Any] = {"score": "softmax", "router_bias": False, "norm_topk": True}
    return MoeGeometry(num_experts, top_k, 24, (True,), **(defaults | options))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_both_ways_through_the_experts_agree(dtype: torch.dtype, tolerance: float, tokens: int) -> None:
    """With 16 experts and few tokens many experts get none."""
    torch.manual_seed(0)
    config = LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=32, num_attention_heads=2)
    geometry = geometry_from_config(config.to_dict())

    def allocate(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    block = MixtureOfExperts(geometry, moe(16, 3), allocate)
    x = torch.randn(tokens, 32).to(dtype)
    weights, experts = block.router.forward(x)
    expected = torch.stack([expert_mix(block, token, w, e) for token, w, e in zip(x, weights, experts, strict=True)])
    for way in (block._every_expert, block._chosen_experts):
        torch.testing.assert_close(way(x, weights.to(dtype), experts).float(), expected, atol=tolerance, rtol=tolerance)


def expert_mix(block: MixtureOfExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """One token in float32, expert by expert."""
    total = torch.zeros(len(x))
    for weight, e in zip(weights, experts, strict=True):
        gate, up = (block.gate_up[e].float() @ x.float()).chunk(2)
        total += weight * (torch.nn.functional.silu(gate) * up) @ block.down[e].float()
    return total


@pytest.mark.parametrize("options", [{"router_bias": True}, {"num_groups": 2}])
def test_a_router_that_no_family_has_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need sigmoid scores"):
        Router(moe(8, 2, **options), 16, partial(torch.empty))


def test_prompts_are_batched_by_length_within_the_token_bound() -> None:
    lengths = [9000, 10, 8000, 3, 9000, 20000]
    batches = list(padded_batches(lengths))
    assert batches == [[3, 1], [2], [0], [4], [5]]
    assert list(padded_batches([])) == []
