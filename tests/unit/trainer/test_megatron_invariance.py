"""Loss and gradient of a batch do not depend on how it is cut: micro-batches, packing, parallel layout."""

from typing import Any

import pytest
from ranks import on_ranks, trainer_of, weight_digests
from trainer_models import folder_digests, make_samples, run_config

from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_SAMPLES = 8
_MOE, _TIED = "glm4-moe-mtp", "llama-tied"
_COMPARED = ("train/loss", "train/grad_norm", "train/train_rollout_kl", "train/ess_ratio", "train/trainable_tokens")


def _two_steps(trainer: MegatronTrainer, samples: list[TrainSample]) -> list[dict[str, float]]:
    return [trainer.train_step(samples) for _ in range(2)]


def _weights_and_two_steps(
    trainer: MegatronTrainer, samples: list[TrainSample]
) -> tuple[dict[str, str], list[dict[str, float]]]:
    return weight_digests(trainer), _two_steps(trainer, samples)


def _check_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, reference in zip(found, expected, strict=True):
        for name in _COMPARED:
            assert step[name] == pytest.approx(reference[name], rel=1e-5), name


@pytest.fixture(scope="module")
def expected() -> dict[str, list[dict[str, float]]]:
    """One rank, one padded micro-batch."""
    results = {}
    for name in (_MOE, _TIED, "llama-biased"):
        config = run_config(name, samples=_SAMPLES, trainer={"packing": False})
        with trainer_of(name, config) as trainer:
            results[name] = _two_steps(trainer, make_samples(name, _SAMPLES))
    return results


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_micro_batches_change_nothing(expected: dict[str, Any], micro_batch_size: int, packing: bool) -> None:
    name = "glm4-moe-mtp"
    trainer = {"micro_batch_size": micro_batch_size, "packing": packing}
    with trainer_of(name, run_config(name, samples=_SAMPLES, trainer=trainer)) as megatron:
        _check_equal(_two_steps(megatron, make_samples(name, _SAMPLES)), expected[name])


_FAST = {
    "expert-2": (_MOE, 2, {"expert": 2}, True),
    "pipeline-2": (_MOE, 2, {"pipeline": 2}, True),
    "tensor-2": (_MOE, 2, {"tensor": 2}, True),
    "tensor-2-tied": (_TIED, 2, {"tensor": 2}, True),
}
_SLOW = {
    "data-2-padded": (_MOE, 2, {}, False),
    "expert-2-padded": (_MOE, 2, {"expert": 2}, False),
    "pipeline-2-padded": (_MOE, 2, {"pipeline": 2}, False),
    "pipeline-2-tied": (_TIED, 2, {"pipeline": 2}, True),
    "tensor-2-biased": ("llama-biased", 2, {"tensor": 2}, True),
    "tensor-2-padded": (_TIED, 2, {"tensor": 2}, False),
    "pipeline-2-expert-2": (_MOE, 4, {"pipeline": 2, "expert": 2}, True),
    "tensor-2-expert-2": (_MOE, 4, {"tensor": 2, "expert": 2}, True),
    "tensor-2-pipeline-2": (_MOE, 4, {"tensor": 2, "pipeline": 2}, True),
}
_LAYOUTS = [pytest.param(*layout, id=name) for name, layout in _FAST.items()] + [
    pytest.param(*layout, id=name, marks=pytest.mark.slow) for name, layout in _SLOW.items()
]


@pytest.mark.parametrize(("name", "ranks", "parallel", "packing"), _LAYOUTS)
def test_parallel_layouts_change_nothing(
    expected: dict[str, Any], name: str, ranks: int, parallel: dict[str, int], packing: bool
) -> None:
    trainer = {"num_ranks": ranks, "parallel": parallel, "packing": packing, "micro_batch_size": 2}
    config = run_config(name, samples=_SAMPLES, trainer=trainer)
    for weights, steps in on_ranks(name, config, _weights_and_two_steps, make_samples(name, _SAMPLES)):
        assert weights == folder_digests(name)  # every tensor of the folder, whole, bit for bit, and no other
        _check_equal(steps, expected[name])


def test_an_uneven_batch_leaves_a_rank_without_samples() -> None:
    """5 samples on 2 ranks in micro-batches of 2: the last pass has one sample for both ranks together."""
    name, samples = "glm4-moe-mtp", make_samples("glm4-moe-mtp", 5)
    with trainer_of(name, run_config(name, samples=_SAMPLES)) as trainer:
        expected = _two_steps(trainer, samples)
    config = run_config(
        name, samples=_SAMPLES, trainer={"num_ranks": 2, "parallel": {"expert": 2}, "micro_batch_size": 2}
    )
    for steps in on_ranks(name, config, _two_steps, samples):
        _check_equal(steps, expected)
