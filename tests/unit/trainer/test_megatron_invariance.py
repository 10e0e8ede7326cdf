"""Loss, gradients and weights do not depend on how a batch is cut: micro-batches, packing, parallel layout."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of, weight_digests
from trainer_models import folder_digests, make_samples, run_config

from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_SAMPLES = 8
_MOE, _TIED, _LATENT, _ODD = "glm4-moe-mtp", "llama-tied", "deepseek-v3", "llama-3-layers"
_COMPARED = ("train/loss", "train/grad_norm", "train/train_rollout_kl", "train/ess_ratio", "train/trainable_tokens")


@dataclass
class _Seen:
    """What a rank has seen of three steps."""

    digests: dict[str, str]  # of the weights before them
    steps: list[dict[str, float]]
    gradients: dict[str, np.ndarray]  # of the last one, by Hugging Face name
    weights: dict[str, np.ndarray]  # after them


def _three_steps(trainer: MegatronTrainer, samples: list[TrainSample]) -> _Seen:
    digests = weight_digests(trainer)
    steps = [trainer.train_step(samples) for _ in range(3)]
    weights = {name: tensor.clone().numpy() for name, tensor in trainer.named_weights()}
    if trainer._config.trainer.distributed_optimizer:
        return _Seen(digests, steps, {}, weights)  # no rank has whole gradients
    for parameter in trainer._model.parameters():
        parameter.data = getattr(parameter, "main_grad", torch.zeros_like(parameter))  # MTP layers are frozen
    gradients = {n: t.clone().numpy() for n, t in trainer.named_weights() if not n.endswith("e_score_correction_bias")}
    return _Seen(digests, steps, gradients, weights)


def _samples(name: str) -> list[TrainSample]:
    """The MoE replays random routes, so that a row in the wrong place shows."""
    return make_samples(name, _SAMPLES, with_routes=name == _MOE)


def _config(name: str, **trainer: Any) -> Any:
    """No clipping, so that buffers hold the very gradients; and a large epsilon, so that Adam does not divide rounding
    errors by themselves where a gradient is nearly zero."""
    optimizer = {"lr": 1e-3, "clip_grad": 0, "eps": 1e-3}
    fixed = {"routing_replay": name == _MOE, "optimizer": optimizer, "distributed_optimizer": False}
    return run_config(name, samples=_SAMPLES, trainer={**fixed, **trainer})


def _check_equal(found: _Seen, expected: _Seen) -> None:
    for step, reference in zip(found.steps, expected.steps, strict=True):
        for name in _COMPARED:
            assert step[name] == pytest.approx(reference[name], rel=1e-5), name
    # Of the largest element of a tensor. These models are wild (initial weights of 0.2), so that fp32 rounding grows.
    if found.gradients:
        _check_close(found.gradients, expected.gradients, tolerance=5e-5)
    _check_close(found.weights, expected.weights, tolerance=1e-5)


def _check_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], *, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max()), 1e-2)
        np.testing.assert_allclose(found[name], value, atol=tolerance * scale, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def expected() -> Any:
    """One rank, one padded micro-batch; made when first asked for."""
    results: dict[str, _Seen] = {}

    def of(name: str) -> _Seen:
        if name not in results:
            with trainer_of(name, _config(name, packing=False)) as trainer:
                results[name] = _three_steps(trainer, _samples(name))
        return results[name]

    return of


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_micro_batches_change_nothing(expected: Any, micro_batch_size: int, packing: bool) -> None:
    reference = expected(_MOE)
    with trainer_of(_MOE, _config(_MOE, micro_batch_size=micro_batch_size, packing=packing)) as megatron:
        _check_equal(_three_steps(megatron, _samples(_MOE)), reference)


def test_recomputed_activations_change_nothing(expected: Any) -> None:
    reference = expected(_MOE)
    with trainer_of(_MOE, _config(_MOE, micro_batch_size=2, recompute="full")) as megatron:
        _check_equal(_three_steps(megatron, _samples(_MOE)), reference)


_FAST = {
    "expert-2": (_MOE, 2, {"expert": 2}, True),
    "pipeline-2": (_MOE, 2, {"pipeline": 2}, True),
    "tensor-2": (_MOE, 2, {"tensor": 2}, True),
    "tensor-2-tied": (_TIED, 2, {"tensor": 2}, True),
    "tensor-2-latent": (_LATENT, 2, {"tensor": 2}, True),
    "context-2": (_MOE, 2, {"context": 2}, True),
    "context-2-latent": (_LATENT, 2, {"context": 2}, True),
}
_SLOW = {
    "data-2": (_MOE, 2, {}, True),
    "data-2-padded": (_MOE, 2, {}, False),
    "expert-2-padded": (_MOE, 2, {"expert": 2}, False),
    "pipeline-2-padded": (_MOE, 2, {"pipeline": 2}, False),
    "pipeline-2-tied": (_TIED, 2, {"pipeline": 2}, True),
    "tensor-2-biased": ("llama-biased", 2, {"tensor": 2}, True),
    "tensor-2-padded": (_TIED, 2, {"tensor": 2}, False),
    "pipeline-2-uneven": (_ODD, 2, {"pipeline": 2}, True),
    "context-2-padded": (_MOE, 2, {"context": 2}, False),
    "context-2-expert-2": (_MOE, 2, {"context": 2, "expert": 2}, True),
    "context-4-repeats-key-value-heads": (_TIED, 4, {"context": 4}, True),
    "tensor-2-context-2": (_MOE, 4, {"tensor": 2, "context": 2, "expert": 4}, True),
    "tensor-2-context-2-latent": (_LATENT, 4, {"tensor": 2, "context": 2}, True),
    "pipeline-2-context-2": (_MOE, 4, {"pipeline": 2, "context": 2}, True),
    "pipeline-2-expert-2": (_MOE, 4, {"pipeline": 2, "expert": 2}, True),
    "tensor-2-expert-2": (_MOE, 4, {"tensor": 2, "expert": 2}, True),
    "tensor-2-pipeline-2": (_MOE, 4, {"tensor": 2, "pipeline": 2}, True),
}
_LAYOUTS = [pytest.param(*layout, id=name) for name, layout in _FAST.items()] + [
    pytest.param(*layout, id=name, marks=pytest.mark.slow) for name, layout in _SLOW.items()
]


@pytest.mark.parametrize(("name", "ranks", "parallel", "packing"), _LAYOUTS)
def test_parallel_layouts_change_nothing(
    expected: Any, name: str, ranks: int, parallel: dict[str, int], packing: bool
) -> None:
    config = _config(name, num_ranks=ranks, parallel=parallel, packing=packing, micro_batch_size=2)
    for seen in on_ranks(name, config, _three_steps, _samples(name)):
        assert seen.digests == folder_digests(name)  # every tensor of the folder, whole, bit for bit, and no other
        _check_equal(seen, expected(name))


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(1, {}, id="1"),
        pytest.param(2, {}, id="data-2"),
        pytest.param(2, {"expert": 2}, id="expert-2", marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2}, id="data-2-pipeline-2", marks=pytest.mark.slow),
        pytest.param(4, {"context": 2}, id="data-2-context-2", marks=pytest.mark.slow),
    ],
)
def test_the_distributed_optimizer_changes_nothing(expected: Any, ranks: int, parallel: dict[str, int]) -> None:
    config = _config(_MOE, num_ranks=ranks, parallel=parallel, micro_batch_size=2, distributed_optimizer=True)
    for seen in on_ranks(_MOE, config, _three_steps, _samples(_MOE)):
        assert not seen.gradients
        _check_equal(seen, expected(_MOE))


@pytest.mark.slow
def test_bf16_gradient_buffers_are_near(expected: Any) -> None:
    """Two of eight bits of a gradient's mantissa may go in adding up 4 micro-batches."""
    config = _config(_MOE, micro_batch_size=2, precision="bf16", gradient_precision="bf16")
    (seen,) = on_ranks(_MOE, config, _three_steps, _samples(_MOE))
    norm, reference = (s.steps[0]["train/grad_norm"] for s in (seen, expected(_MOE)))
    assert norm == pytest.approx(reference, rel=0.05)
    assert {g.dtype for g in seen.gradients.values()} == {np.dtype("float32")}  # as the folder has them


@pytest.mark.slow
def test_recomputation_in_a_split_pipeline_changes_nothing(expected: Any) -> None:
    parallel = {"pipeline": 2, "context": 2, "expert": 2}
    config = _config(_MOE, num_ranks=4, parallel=parallel, micro_batch_size=2, recompute="full")
    for seen in on_ranks(_MOE, config, _three_steps, _samples(_MOE)):
        _check_equal(seen, expected(_MOE))


def test_an_uneven_batch_leaves_a_rank_without_samples() -> None:
    """5 samples on 2 ranks in micro-batches of 2: the last pass has one sample for both ranks together."""
    samples = make_samples(_MOE, 5, with_routes=True)
    with trainer_of(_MOE, _config(_MOE)) as trainer:
        expected = _three_steps(trainer, samples)
    config = _config(_MOE, num_ranks=2, parallel={"expert": 2}, micro_batch_size=2)
    for seen in on_ranks(_MOE, config, _three_steps, samples):
        _check_equal(seen, expected)
