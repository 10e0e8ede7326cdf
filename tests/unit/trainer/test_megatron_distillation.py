"""The top-k distillation loss inside the trainer, against autograd on transformers, and over tensor-parallel ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of
from trainer_models import geometry_of, hf_folder, make_samples, run_config
from transformers import AutoModelForCausalLM

from miles_core.algorithms.distillation import top_k_reverse_kl
from miles_core.config.run import RunConfig
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_NAME, _COUNT, _K, _TEMPERATURE = "llama-tied", 5, 3, 0.7


def _config(**trainer: Any) -> RunConfig:
    return run_config(
        _NAME,
        samples=_COUNT,
        trainer={"optimizer": {"clip_grad": 0}} | trainer,
        algorithm={"advantage_estimator": "none", "distill_top_k_coef": 2.0},
        distillation={"teachers": ["teacher"], "top_k": _K},
    )


def _samples() -> list[TrainSample]:
    """A teacher with random favourites, alike at no two tokens."""
    rng, vocabulary = np.random.default_rng(3), geometry_of(_NAME).vocab_size
    samples = []
    for s in make_samples(_NAME, _COUNT):
        logits = rng.normal(0, 2, (s.response_length, vocabulary))
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-log_probs)[:, :_K]
        taught = np.take_along_axis(log_probs, ids, -1).astype(np.float32)
        given = {"teacher_top_k_ids": ids.astype(np.int32), "teacher_top_k_log_probs": taught}
        samples.append(replace(s, advantages=np.zeros_like(s.advantages), **given))
    return samples


def test_loss_and_gradient_equal_autograd_on_transformers() -> None:
    samples = _samples()
    with trainer_of(_NAME, _config()) as trainer:
        metrics = trainer.train_step(samples)
    model = AutoModelForCausalLM.from_pretrained(hf_folder(_NAME), dtype=torch.float32, attn_implementation="eager")
    loss = torch.zeros([])
    for s in samples:
        start = len(s.tokens) - s.response_length
        logits = model(torch.from_numpy(s.tokens.astype(np.int64))[None]).logits[0, start - 1 : -1]
        student = torch.log_softmax(logits / _TEMPERATURE, -1).gather(-1, torch.from_numpy(s.teacher_top_k_ids).long())
        mask = torch.from_numpy(s.loss_mask > 0)
        kl = top_k_reverse_kl(student, torch.from_numpy(s.teacher_top_k_log_probs), mask)
        loss = loss + (torch.from_numpy(s.loss_weights) * kl).sum()
    (2 * loss).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert metrics["train/distill_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(2 * loss.item(), rel=1e-5)
    assert metrics["train/pg_loss"] == 0.0
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def _step(trainer: MegatronTrainer, samples: list[TrainSample]) -> dict[str, float]:
    return trainer.train_step(samples)


@pytest.mark.slow
def test_a_vocabulary_in_two_parts_changes_nothing() -> None:
    samples = _samples()
    with trainer_of(_NAME, _config()) as trainer:
        expected = trainer.train_step(samples)
    for found in on_ranks(_NAME, _config(num_ranks=2, parallel={"tensor": 2}), _step, samples):
        for metric in ("train/distill_loss", "train/grad_norm"):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-5)
