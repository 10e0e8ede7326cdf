"""Saved and loaded: the next step is that of the run that was never interrupted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks, trainer_of, weight_digests
from trainer_models import make_samples, run_config

from conversion.torch_dist_reader import TorchDistFolder
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_NAME, _COUNT = "glm4-moe-mtp", 4
_TRAINER: dict[str, Any] = {"micro_batch_size": 2, "optimizer": {"lr": 1e-2, "warmup_steps": 5}}


def _train_and_save(trainer: MegatronTrainer, samples: list[TrainSample], folder: Path) -> tuple[Any, Any, Any]:
    """Two steps, saved; then a third."""
    trainer.train_step(samples)
    trainer.train_step(samples)
    trainer.save(folder)
    saved = weight_digests(trainer)
    return saved, trainer.train_step(samples), weight_digests(trainer)


def _load_and_train(trainer: MegatronTrainer, samples: list[TrainSample], folder: Path) -> tuple[Any, Any, Any]:
    trainer.load(folder)
    loaded = weight_digests(trainer)
    return loaded, trainer.train_step(samples), weight_digests(trainer)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    config = run_config(_NAME, samples=_COUNT, trainer=_TRAINER | {"precision": precision})
    samples = make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, config) as trainer:
        uninterrupted = _train_and_save(trainer, samples, tmp_path)
    (resumed,) = on_ranks(_NAME, config, _load_and_train, samples, tmp_path)
    assert resumed == uninterrupted
    assert uninterrupted[1]["train/lr-pg_0"] == pytest.approx(1e-2 * 3 / 5)


@pytest.mark.parametrize(
    ("saved_at", "loaded_at"),
    [
        pytest.param({"expert": 2}, {}, id="expert-2-to-1"),
        pytest.param({}, {"pipeline": 2}, id="1-to-pipeline-2"),
        pytest.param({"pipeline": 2}, {"expert": 2}, id="pipeline-2-to-expert-2", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, {"expert": 2}, id="tensor-2-to-expert-2", marks=pytest.mark.slow),
        pytest.param({}, {"tensor": 2}, id="1-to-tensor-2", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, {"tensor": 1}, id="tensor-2-to-data-2"),
        pytest.param({"context": 2}, {"pipeline": 2}, id="context-2-to-pipeline-2", marks=pytest.mark.slow),
    ],
)
def test_another_layout_goes_on(tmp_path: Path, saved_at: dict[str, int], loaded_at: dict[str, int]) -> None:
    samples = make_samples(_NAME, _COUNT)

    def config(parallel: dict[str, int]) -> Any:
        ranks = {"num_ranks": 2 if parallel else 1, "parallel": parallel}
        return run_config(_NAME, samples=_COUNT, trainer=_TRAINER | ranks)

    def at(parallel: dict[str, int], work: Callable[..., Any]) -> list[tuple[Any, Any, Any]]:
        if parallel:
            return on_ranks(_NAME, config(parallel), work, samples, tmp_path)
        with trainer_of(_NAME, config(parallel)) as trainer:
            return [work(trainer, samples, tmp_path)]

    before, expected, _ = at(saved_at, _train_and_save)[0]
    for loaded, metrics, _ in at(loaded_at, _load_and_train):
        assert loaded == before
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_a_checkpoint_before_the_first_step_loads(tmp_path: Path) -> None:
    config, samples = run_config(_NAME, samples=_COUNT, trainer=_TRAINER), make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, config) as trainer:
        trainer.save(tmp_path)
        expected = trainer.train_step(samples), weight_digests(trainer)
    with trainer_of(_NAME, config) as trainer:
        trainer.train_step(samples)
        trainer.load(tmp_path)
        assert (trainer.train_step(samples), weight_digests(trainer)) == expected


def test_the_converter_reads_what_training_saves(tmp_path: Path) -> None:
    """Export works from the trainer's own folder: same names, same values."""
    with trainer_of(_NAME, run_config(_NAME, samples=_COUNT)) as trainer:
        trainer.train_step(make_samples(_NAME, _COUNT))
        trainer.save(tmp_path)
        rules = trainer._rules
        weights = dict(trainer.named_weights())
        stored = TorchDistFolder(tmp_path)
        assert sorted(stored.names) == sorted(rule.megatron for rule in rules)
        for rule in rules:
            for name, tensor in rule.to_hf(stored.read(rule.megatron), weights).items():
                assert tensor.equal(weights[name]), name


def test_a_refreshed_reference_is_saved(tmp_path: Path) -> None:
    algorithm = {"kl_loss_coef": 0.1, "ref_update_interval": 1}
    config, samples = run_config(_NAME, samples=_COUNT, trainer=_TRAINER, algorithm=algorithm), make_samples(_NAME, 4)
    with trainer_of(_NAME, config) as trainer:
        initial = np.concatenate(trainer.log_probs(samples, "reference"))
        np.testing.assert_array_equal(initial, np.concatenate(trainer.log_probs(samples, "policy")))
        reference = trainer.log_probs(samples, "reference")
        with_reference = [replace(s, ref_log_probs=lp) for s, lp in zip(samples, reference, strict=True)]
        trainer.train_step(with_reference)
        trainer.refresh_reference()
        after_one_step = np.concatenate(trainer.log_probs(samples, "policy"))
        trainer.train_step(with_reference)
        refreshed = np.concatenate(trainer.log_probs(samples, "reference"))
        np.testing.assert_array_equal(refreshed, after_one_step)
        assert not np.array_equal(refreshed, initial)
        trainer.save(tmp_path)
        policy = np.concatenate(trainer.log_probs(samples, "policy"))
    with trainer_of(_NAME, config) as trainer:
        trainer.load(tmp_path)
        np.testing.assert_array_equal(np.concatenate(trainer.log_probs(samples, "reference")), refreshed)
        np.testing.assert_array_equal(np.concatenate(trainer.log_probs(samples, "policy")), policy)
