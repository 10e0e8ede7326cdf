"""FP8 in the whole trainer: which layers, how near to full precision, and that a bad step is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of, weight_digests
from trainer_models import make_samples, run_config

from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_NAME, _COUNT = "glm4-moe-mtp", 6


def _config(name: str = _NAME, **trainer: Any) -> Any:
    return run_config(name, samples=_COUNT, trainer={"fp8": True, "optimizer": {"lr": 1e-3}, **trainer})


@pytest.mark.parametrize("name", [_NAME, "deepseek-v3"])
def test_which_layers_multiply_in_fp8(name: str) -> None:
    with trainer_of(name, _config(name)) as trainer:
        modules = dict(trainer._model.named_modules())
        replaced = {n for n, m in modules.items() if "_forward_impl" in vars(m)}
        experts = {n for n, m in modules.items() if getattr(m, "products", None) is trainer._policy_products}
        linear = {n for n in modules if n.rpartition(".")[2].startswith("linear_")}
    assert replaced == linear
    assert experts == {n for n in modules if n.endswith(".mlp.experts")} != set()
    assert not any("eh_proj" in n or "output_layer" in n or "router" in n for n in replaced)


@pytest.mark.parametrize("name", ["glm4-moe", "llama-biased", "deepseek-v3"])
def test_log_probs_and_gradients_stay_near_full_precision(name: str) -> None:
    """e4m3 has 3 bits of mantissa: half a step is 6%, and errors of single products mostly cancel in sums."""
    samples, found = make_samples(name, _COUNT), []
    for fp8 in (False, True):
        with trainer_of(name, _config(name, fp8=fp8, optimizer={"clip_grad": 0})) as trainer:
            log_probs = np.concatenate(trainer.log_probs(samples, "policy"))
            metrics = trainer.train_step(samples)
            gradients = torch.cat([p.main_grad.flatten() for p in trainer._model.parameters() if p.requires_grad])
            found.append((log_probs, gradients, metrics))
    (exact, exact_gradients, plain), (log_probs, gradients, metrics) = found
    error = np.abs(log_probs - exact)
    assert 0 < error.mean() < 0.1 * np.abs(exact).mean()
    assert torch.cosine_similarity(gradients, exact_gradients, dim=0) > 0.9
    assert metrics["train/fp8_non_finite_blocks"] == 0
    assert "train/fp8_non_finite_blocks" not in plain


def test_a_step_that_is_not_finite_is_refused_and_counted() -> None:
    samples = make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, _config()) as trainer:
        weight = trainer._model.decoder.layers[0].mlp.linear_fc1.weight
        with torch.no_grad():
            weight[0, 0] = torch.inf
        before = weight_digests(trainer)
        metrics = trainer.train_step(samples)
        assert metrics["train/skipped_steps"] == 1
        assert metrics["train/fp8_non_finite_blocks"] > 0
        assert weight_digests(trainer) == before


def _losses(trainer: MegatronTrainer, samples: list[TrainSample]) -> list[float]:
    return [trainer.train_step(samples)["train/grad_norm"] for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"expert": 2}, {"tensor": 2}, {"pipeline": 2}], ids=lambda p: next(iter(p)))
def test_parallel_layouts_are_near_one_rank(parallel: dict[str, int]) -> None:
    """Blocks of 128 fall elsewhere when ranks share a matrix, or a gradient's tokens: equal up to e4m3's rounding."""
    samples = make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, _config()) as trainer:
        expected = _losses(trainer, samples)
    config = _config(num_ranks=2, parallel=parallel, micro_batch_size=3)
    for found in on_ranks(_NAME, config, _losses, samples):
        assert found == pytest.approx(expected, rel=0.1)
