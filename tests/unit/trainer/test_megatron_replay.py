"""R3 in the trainer: replayed experts, own gate weights, absolute layer numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of
from torch import Tensor
from torch.nn import functional as F
from trainer_models import geometry_of, hf_folder, make_samples, run_config
from transformers import AutoModelForCausalLM

from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_NAME = "glm4-moe"  # layer 0 dense, layers 1 to 3 with 8 experts, top-2
_COUNT = 4


def _config(*, replay: bool, **trainer: Any) -> Any:
    return run_config(_NAME, samples=_COUNT, trainer={"routing_replay": replay, "micro_batch_size": 2, **trainer})


@pytest.fixture(scope="module")
def own_routes() -> list[TrainSample]:
    """Samples with the routes that the model itself takes; the dense layer's row holds an expert it doesn't have."""
    geometry = geometry_of(_NAME)
    samples, maps = make_samples(_NAME, _COUNT), dict[int, Tensor]()
    with trainer_of(_NAME, _config(replay=False)) as trainer:
        for layer in trainer._model.decoder.layers[1:]:
            number = layer.layer_number - 1
            layer.mlp.router.register_forward_hook(lambda *a, number=number: maps.__setitem__(number, a[-1][1]))
        routed = []
        for sample in samples:
            trainer.log_probs([sample], "policy")
            routes = np.full((len(sample.tokens) - 1, geometry.num_layers, 2), 99, dtype=np.int16)
            for number, chosen in maps.items():
                routes[:, number] = chosen[:-1].nonzero()[:, 1].view(-1, 2)
            routed.append(replace(sample, routed_experts=routes))
    return routed


def _results(trainer: MegatronTrainer, samples: list[TrainSample]) -> dict[str, Any]:
    log_probs = np.concatenate(trainer.log_probs(samples, "policy"))
    return {"log_probs": log_probs, **trainer.train_step(samples)}


def _check_bit_equal(plain: dict[str, Any], replayed: dict[str, Any]) -> None:
    assert replayed.pop("train/routing_replay_overlap") == 1.0
    np.testing.assert_array_equal(plain.pop("log_probs"), replayed.pop("log_probs"))
    assert plain == replayed


@pytest.mark.parametrize("packing", [True, False])
def test_replaying_own_routes_is_bit_equal(own_routes: list[TrainSample], packing: bool) -> None:
    results = []
    for replay in (False, True):
        with trainer_of(_NAME, _config(replay=replay, packing=packing)) as trainer:
            results.append(_results(trainer, own_routes))
    _check_bit_equal(*results)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"pipeline": 2}, id="pipeline"),
        pytest.param({"tensor": 2}, id="tensor", marks=pytest.mark.slow),
        pytest.param({"context": 2}, id="context", marks=pytest.mark.slow),
    ],
)
def test_replaying_own_routes_is_bit_equal_on_two_ranks(
    own_routes: list[TrainSample], parallel: dict[str, int]
) -> None:
    plain, replayed = (
        on_ranks(_NAME, _config(replay=replay, num_ranks=2, parallel=parallel), _results, own_routes)
        for replay in (False, True)
    )
    for one, other in zip(plain, replayed, strict=True):
        _check_bit_equal(one, other)


def _force_routes(model: Any, routes: Tensor) -> None:
    """Makes a transformers GLM take `routes` [T, layers, 2], with gate weights from its own scores."""

    def forced(gate: Any, chosen: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(hidden.view(-1, hidden.shape[-1]), gate.weight)
            weights = logits.sigmoid().gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen

        return forward

    for number in (1, 2, 3):
        gate = model.model.layers[number].mlp.gate
        gate.forward = forced(gate, routes[:, number])


def test_replayed_routes_equal_transformers_with_the_same_routes() -> None:
    """Every layer has random routes of its own, so a shift by a layer or a token would show. Gradients too."""
    samples = make_samples(_NAME, _COUNT, with_routes=True)
    with trainer_of(_NAME, _config(replay=True, optimizer={"clip_grad": 0})) as trainer:
        ours = trainer.log_probs(samples, "policy")
        metrics = trainer.train_step(samples)
        gradients = [layer.mlp.router.weight.main_grad for layer in trainer._model.decoder.layers[1:]]

    model = AutoModelForCausalLM.from_pretrained(hf_folder(_NAME), dtype=torch.float32)
    loss = torch.zeros([])
    for sample, log_probs in zip(samples, ours, strict=True):
        assert sample.routed_experts is not None
        routes = torch.from_numpy(sample.routed_experts.astype(np.int64))
        _force_routes(model, torch.cat([routes, routes[:1]]))  # the last token's row touches nothing
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        start = len(tokens) - sample.response_length
        rows = model(tokens[None]).logits[0, start - 1 : -1].div(0.7).log_softmax(-1)
        expected = rows.gather(-1, tokens[start:, None])[:, 0]
        np.testing.assert_allclose(log_probs, expected.detach(), atol=1e-4)
        loss -= (torch.from_numpy(sample.loss_weights * sample.advantages) * expected).sum()
    loss.backward()
    for layer, gradient in zip(model.model.layers[1:], gradients, strict=True):
        expected_gradient = layer.mlp.gate.weight.grad
        scale = expected_gradient.abs().max().item()
        assert scale > 1e-3  # it flows through the gate weights
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-4 * scale, rtol=0)
    assert 0 < metrics["train/routing_replay_overlap"] < 1


def _loss_and_norm(trainer: MegatronTrainer, samples: list[TrainSample]) -> tuple[float, float]:
    metrics = trainer.train_step(samples)
    return metrics["train/loss"], metrics["train/grad_norm"]


def test_recomputation_replays_too() -> None:
    samples, results = make_samples(_NAME, _COUNT, with_routes=True), []
    for recompute in ("none", "full"):
        with trainer_of(_NAME, _config(replay=True, micro_batch_size=1, recompute=recompute)) as trainer:
            results.append(_loss_and_norm(trainer, samples))
    assert results[0] == results[1]


@pytest.mark.slow
def test_recomputation_replays_too_in_a_pipeline() -> None:
    """Several micro-batches are under way at once, and each is recomputed with its own routes."""
    samples = make_samples(_NAME, _COUNT, with_routes=True)
    plain, recomputed = (
        on_ranks(
            _NAME,
            _config(replay=True, micro_batch_size=1, num_ranks=2, parallel={"pipeline": 2}, recompute=recompute),
            _loss_and_norm,
            samples,
        )
        for recompute in ("none", "full")
    )
    assert recomputed == plain


def test_a_batch_without_routes_is_refused() -> None:
    samples = make_samples(_NAME, _COUNT, with_routes=True)
    with (
        trainer_of(_NAME, _config(replay=True)) as trainer,
        pytest.raises(ValueError, match=r"sample 102 has no routed_experts.*routing_replay=false"),
    ):
        trainer.train_step([*samples[:2], replace(samples[2], routed_experts=None), samples[3]])
