"""PPO's critic: values and gradients against transformers, layouts that change nothing, and checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of
from trainer_models import hf_folder, make_samples, run_config
from transformers import AutoModelForCausalLM

from miles_core.config.run import RunConfig
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample
from miles_core.weight_sync.bucket import tensor_digest

_MOE, _COUNT = "glm4-moe-mtp", 6
_CLIP = 0.3


def _config(name: str, **trainer: Any) -> RunConfig:
    algorithm = {"advantage_estimator": "ppo", "value_clip": _CLIP}
    return run_config(name, samples=_COUNT, trainer=trainer, algorithm=algorithm)


def _samples(name: str, **options: Any) -> list[TrainSample]:
    """Old values near those of a new head, returns all over the place."""
    rng = np.random.default_rng(7)
    return [
        replace(
            s,
            old_values=rng.normal(0, 0.5, s.response_length).astype(np.float32),
            returns=rng.normal(0, 1, s.response_length).astype(np.float32),
        )
        for s in make_samples(name, _COUNT, **options)
    ]


def _head(trainer: MegatronTrainer) -> torch.Tensor:
    assert trainer._critic is not None
    return trainer._critic._model.value_head


@pytest.mark.parametrize("name", ["glm4-moe", "llama-tied", "gemma2"])
def test_values_and_gradients_equal_autograd_on_transformers(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(hf_folder(name), dtype=torch.float32, attn_implementation="eager")
    samples = _samples(name)
    with trainer_of(name, _config(name, optimizer={"clip_grad": 0})) as trainer:
        head = _head(trainer).detach().clone().requires_grad_()
        ours = trainer.values(samples)
        metrics = trainer.train_critic(samples)
        head_gradient = _head(trainer).main_grad.clone()

    loss, clipped_weight = torch.zeros([]), 0.0
    for s, found in zip(samples, ours, strict=True):
        start = len(s.tokens) - s.response_length
        hidden = model.model(torch.from_numpy(s.tokens.astype(np.int64))[None]).last_hidden_state[0]
        values = hidden[start - 1 : -1] @ head
        np.testing.assert_allclose(found, values.detach(), atol=1e-4 * max(1, values.abs().max().item()))
        old, returns, weights = (torch.from_numpy(x) for x in (s.old_values, s.returns, s.loss_weights))
        free = (values - returns) ** 2
        bound = (old + (values - old).clamp(-_CLIP, _CLIP) - returns) ** 2
        loss = loss + (weights * torch.maximum(free, bound)).sum()
        clipped_weight += float(weights[bound > free].sum())
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([*gradients, head.grad]).item()
    assert metrics["train/critic-value_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["train/critic-value_clipfrac"] == pytest.approx(clipped_weight, abs=1e-6)
    assert 0 < clipped_weight < 1
    assert metrics["train/critic-grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert head.grad is not None
    torch.testing.assert_close(head_gradient, head.grad, rtol=1e-4, atol=1e-5)


def test_the_head_depends_on_the_seed_alone() -> None:
    heads = []
    for seed in (0, 0, 1):
        with trainer_of(_MOE, _config(_MOE).model_copy(update={"seed": seed})) as trainer:
            heads.append(_head(trainer).detach().clone())
    assert heads[0].dtype == torch.float32
    assert heads[0].equal(heads[1]) and not heads[0].equal(heads[2])
    assert heads[0].std().item() == pytest.approx(0.02, rel=0.3)


def _two_steps(trainer: MegatronTrainer, samples: list[TrainSample]) -> tuple[Any, Any]:
    values = np.concatenate(trainer.values(samples))
    return values, [trainer.train_critic(samples) for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        pytest.param(_MOE, 1, {"micro_batch_size": 2}, id="micro-batches"),
        pytest.param(_MOE, 1, {"packing": False, "micro_batch_size": 3}, id="padded"),
        pytest.param(_MOE, 2, {"parallel": {"expert": 2}}, id="expert-2", marks=pytest.mark.slow),
        pytest.param("llama-tied", 2, {}, id="data-2", marks=pytest.mark.slow),
        pytest.param("llama-tied", 2, {"parallel": {"tensor": 2}}, id="tensor-2", marks=pytest.mark.slow),
        pytest.param(_MOE, 2, {"parallel": {"tensor": 2}}, id="tensor-2-experts", marks=pytest.mark.slow),
        pytest.param(_MOE, 2, {"parallel": {"pipeline": 2}}, id="pipeline-2", marks=pytest.mark.slow),
        pytest.param("llama-tied", 2, {"parallel": {"pipeline": 2}}, id="pipeline-2-tied", marks=pytest.mark.slow),
    ],
)
def test_layouts_change_nothing(name: str, ranks: int, layout: dict[str, Any]) -> None:
    samples = _samples(name)
    with trainer_of(name, _config(name)) as trainer:
        expected_values, expected = _two_steps(trainer, samples)
    config = _config(name, **({"num_ranks": ranks, "micro_batch_size": 3 if ranks > 1 else 1} | layout))
    for values, steps in on_ranks(name, config, _two_steps, samples):
        np.testing.assert_allclose(values, expected_values, atol=1e-5)
        for step, reference in zip(steps, expected, strict=True):
            for metric in ("value_loss", "value_clipfrac", "explained_variance", "grad_norm"):
                wanted = pytest.approx(reference[f"train/critic-{metric}"], rel=1e-5)
                assert step[f"train/critic-{metric}"] == wanted, metric


def test_critic_and_policy_learn_apart_each_at_its_own_rate() -> None:
    samples = _samples(_MOE)
    config = _config(_MOE, optimizer={"lr": 1e-3}, critic_optimizer={"lr": 1e-2, "warmup_steps": 2})

    def digests(trainer: MegatronTrainer) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in trainer.named_weights()}

    with trainer_of(_MOE, config) as trainer:
        before, values = digests(trainer), np.concatenate(trainer.values(samples))
        rates = [trainer.train_critic(samples)["train/critic-lr-pg_0"] for _ in range(2)]
        assert digests(trainer) == before
        learned = np.concatenate(trainer.values(samples))
        assert not np.array_equal(learned, values)
        assert trainer.train_step(samples)["train/lr-pg_0"] == 1e-3
        assert digests(trainer) != before
        np.testing.assert_array_equal(np.concatenate(trainer.values(samples)), learned)
    assert rates == pytest.approx([5e-3, 1e-2])


def test_the_critic_replays_the_routes_of_the_rollout() -> None:
    results = []
    for seed in (0, 1):
        samples = _samples(_MOE, with_routes=True)
        routes = make_samples(_MOE, _COUNT, seed=seed, with_routes=True)
        if seed:  # other routes for the same tokens
            rng = np.random.default_rng(seed)
            routes = [replace(s, routed_experts=rng.permuted(s.routed_experts, axis=-1)) for s in samples]
            routes = [replace(s, routed_experts=(s.routed_experts + 1) % 8) for s in routes]
        samples = [replace(s, routed_experts=r.routed_experts) for s, r in zip(samples, routes, strict=True)]
        with trainer_of(_MOE, _config(_MOE, routing_replay=True)) as trainer:
            results.append(np.concatenate(trainer.values(samples)))
            metrics = trainer.train_critic(samples)
        assert 0 < metrics["train/critic-routing_replay_overlap"] < 1
    assert not np.allclose(*results)


def _train_and_save(trainer: MegatronTrainer, samples: list[TrainSample], folder: Path) -> Any:
    trainer.train_critic(samples)
    trainer.train_step(samples)
    trainer.save(folder)
    return np.concatenate(trainer.values(samples)).tolist(), trainer.train_critic(samples), trainer.train_step(samples)


def _load_and_train(trainer: MegatronTrainer, samples: list[TrainSample], folder: Path) -> Any:
    trainer.load(folder)
    return np.concatenate(trainer.values(samples)).tolist(), trainer.train_critic(samples), trainer.train_step(samples)


def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path: Path) -> None:
    samples = _samples(_MOE)
    config = _config(_MOE, micro_batch_size=2, critic_optimizer={"lr": 1e-2, "warmup_steps": 5})
    with trainer_of(_MOE, config) as trainer:
        uninterrupted = _train_and_save(trainer, samples, tmp_path)
    with trainer_of(_MOE, config) as trainer:
        assert _load_and_train(trainer, samples, tmp_path) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"expert": 2}, {"tensor": 2}], ids=str)
def test_a_critic_is_loaded_at_another_layout(tmp_path: Path, layout: dict[str, int]) -> None:
    samples = _samples(_MOE)
    with trainer_of(_MOE, _config(_MOE, micro_batch_size=3)) as trainer:
        values, critic, policy = _train_and_save(trainer, samples, tmp_path)
    config = _config(_MOE, num_ranks=2, micro_batch_size=3, parallel=layout)
    for found in on_ranks(_MOE, config, _load_and_train, samples, tmp_path):
        np.testing.assert_allclose(found[0], values, atol=1e-5)
        for ours, expected in zip(found[1:], (critic, policy), strict=True):
            for name, value in expected.items():
                assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_a_run_without_a_critic_has_no_values() -> None:
    with trainer_of("llama-tied", run_config("llama-tied", samples=_COUNT)) as trainer:
        for call in (trainer.values, trainer.train_critic):
            with pytest.raises(ValueError, match=r"no critic is held: set algorithm\.advantage_estimator=ppo"):
                call(_samples("llama-tied"))
