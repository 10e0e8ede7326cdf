"""Our Megatron model against transformers: log-probs and gradients from the same weights, for each family."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import trainer_of
from torch.nn import functional as F
from trainer_models import MODELS, hf_folder, make_samples, run_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from conversion.safetensors_io import SafetensorsFolder
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_TEMPERATURE = 0.7  # of `run_config`


def _hf_model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(hf_folder(name), dtype=torch.float32, attn_implementation="eager")


def _hf_log_probs(model: PreTrainedModel, sample: TrainSample) -> tuple[torch.Tensor, float]:
    """Log-probs of the response, and the largest logit as their scale."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    logits = model(tokens[None]).logits[0] / _TEMPERATURE
    start = len(tokens) - sample.response_length
    log_probs = -F.cross_entropy(logits[start - 1 : -1], tokens[start:], reduction="none")
    return log_probs, float(logits.detach().abs().max())


def _check_log_probs(trainer: MegatronTrainer, model: PreTrainedModel, samples: list[TrainSample]) -> None:
    for sample, ours in zip(samples, trainer.log_probs(samples, "policy"), strict=True):
        with torch.no_grad():
            expected, scale = _hf_log_probs(model, sample)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected, atol=1e-5 * scale, rtol=0)


_EXACT = [name for name in MODELS if not name.startswith("deepseek")]


@pytest.mark.parametrize(("name", "exact"), [*((name, False) for name in MODELS), *((name, True) for name in _EXACT)])
def test_log_probs_and_gradients_equal_transformers(name: str, exact: bool, tmp_path: Path) -> None:
    samples = make_samples(name, 5)
    model = _hf_model(name)
    config = run_config(name, samples=5, trainer={"optimizer": {"lr": 1e-3, "clip_grad": 0}})
    # Without its check, which asks for replay: here each model takes its own experts.
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"exact": exact})})
    with trainer_of(name, config) as trainer, SafetensorsFolder(hf_folder(name)) as folder:
        weights = dict(trainer.named_weights())
        assert sorted(weights) == sorted(folder.names)
        for tensor_name, tensor in weights.items():
            assert tensor.equal(folder.read(tensor_name)), tensor_name
        _check_log_probs(trainer, model, samples)
        metrics = trainer.train_step(samples)
        for parameter in trainer._model.parameters():
            parameter.data = parameter.main_grad
        ours = dict(trainer.named_weights())

    # On policy the ratio is 1, so the gradient of the clipped loss is that of -weight * advantage * log-prob.
    loss = torch.zeros([])
    for s in samples:
        loss -= (torch.from_numpy(s.loss_weights * s.advantages) * _hf_log_probs(model, s)[0]).sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(tmp_path)  # so the gradients get the names that checkpoints have
    with SafetensorsFolder(tmp_path) as theirs:
        for tensor_name, gradient in ours.items():
            if not tensor_name.endswith("e_score_correction_bias"):  # held fixed
                expected = theirs.read(tensor_name)
                scale = max(expected.abs().max().item(), 1e-3)
                torch.testing.assert_close(gradient, expected, atol=1e-4 * scale, rtol=0)
