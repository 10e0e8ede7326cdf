"""Losses and advantages against those of TRL, by running its own trainers on the same random numbers.

The trainers are real; only what they would get from a model or a user (log-probs, completions, rewards) is given.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_batches import evaluate, packed_batch
from torch import Tensor

from miles_core.algorithms.advantages import SampleView, compute_advantages
from miles_core.algorithms.dapo import overlong_penalty
from miles_core.algorithms.distillation import top_k_reverse_kl
from miles_core.algorithms.log_probs import token_log_probs
from miles_core.algorithms.objective import ObjectiveInputs
from miles_core.config.algorithm import AlgorithmConfig, OffPolicyConfig

GROUPS, GROUP_SIZE, LENGTH, MAX_LENGTH = 3, 4, 6, 8
MASKS = [[int(t != i % 5) if t < 1 + i % LENGTH else 0 for t in range(LENGTH)] for i in range(GROUPS * GROUP_SIZE)]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A GRPO and an RLOO trainer over a model of a few hundred parameters."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=4, num_key_value_heads=1, **sizes))
    folder: Path = tmp_path_factory.mktemp("trl")
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "beta": 0.0,
        "per_device_train_batch_size": GROUPS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_LENGTH,
        "report_to": [],
    }
    common = {
        "model": model,
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_list([{"prompt": "a"}] * GROUPS * GROUP_SIZE),
        "processing_class": tokenizer,
    }
    grpo = GRPOTrainer(args=GRPOConfig(**options), **common)
    rloo = RLOOTrainer(args=RLOOConfig(**options), **common)
    grpo.current_gradient_accumulation_steps = 1
    for trainer in (grpo, rloo):
        trainer.model.train()
    return SimpleNamespace(grpo=grpo, rloo=rloo)


def batch(aggregation: str, scale: float = 0.3) -> ObjectiveInputs:
    found = packed_batch(aggregation, masks=MASKS, scale=scale)
    return replace(found, entropy=found.entropy.detach(), ref_log_probs=found.ref_log_probs)


def padded(values: Tensor) -> Tensor:
    return values.reshape(len(MASKS), LENGTH)


def trl_loss(trainer: Any, x: ObjectiveInputs, weights: Tensor | None = None) -> tuple[float, Tensor]:
    """Loss and gradient of the log-probs from TRL's own loss function."""
    log_probs = x.log_probs.detach().clone().requires_grad_()
    mask = padded(x.loss_mask).long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded(log_probs), padded(x.entropy), None)
    inputs = {
        "prompt_ids": torch.full((len(MASKS), 1), 3),
        "prompt_mask": torch.ones(len(MASKS), 1, dtype=torch.long),
        "completion_ids": torch.full_like(mask, 3),
        "completion_mask": mask,
        "advantages": padded(x.advantages)[:, 0],
        "old_per_token_logps": padded(x.old_log_probs),
        "ref_per_token_logps": padded(x.ref_log_probs),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights,
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), log_probs.grad


# ours, TRL's settings of the trainer and of its arguments
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {"loss_type": "grpo"}, {}),
    "token mean": ({"loss_aggregation": "token_mean"}, {"loss_type": "bnpo"}, {}),
    "dapo": (
        {"loss_aggregation": "token_mean", "eps_clip_high": 0.28},
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {},
    ),
    "dr_grpo": ({"loss_aggregation": "constant"}, {"loss_type": "dr_grpo"}, {}),
    "gspo": (
        {"policy_loss": "gspo", "advantage_estimator": "gspo", "eps_clip": 0.03},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.03},
        {},
    ),
    "cispo": (
        {"policy_loss": "cispo", "loss_aggregation": "token_mean", "eps_clip": 1.0, "eps_clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},  # TRL's bound is of the ratio itself
        {},
    ),
    "dual clip": ({"eps_clip_c": 1.3}, {"loss_type": "grpo"}, {"delta": 1.3}),
    "kl": (
        {"kl_loss_coef": 0.2, "kl_type": "k3"},
        {"loss_type": "grpo", "beta": 0.2},
        {"use_bias_correction_kl": False},
    ),
    "unbiased kl": (
        {"kl_loss_coef": 0.2, "kl_type": "k3", "kl_unbiased": True},
        {"loss_type": "grpo", "beta": 0.2},
        {"use_bias_correction_kl": True},
    ),
    "entropy bonus": (
        {"entropy_coef": 0.2, "loss_aggregation": "token_mean"},
        {"loss_type": "bnpo", "entropy_coef": 0.2, "_entropy_bonus_enabled": True},
        {},
    ),
    "opsm": ({"opsm_delta": 0.05}, {"loss_type": "grpo", "off_policy_mask_threshold": 0.05}, {}),
}


@pytest.mark.parametrize(("ours", "theirs", "arguments"), LOSSES.values(), ids=LOSSES.keys())
def test_loss_and_gradient_equal_those_of_trl(
    trl: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    config = AlgorithmConfig(**ours)
    for name, value in ({"epsilon_low": 0.2, "epsilon_high": 0.2} | theirs).items():
        monkeypatch.setattr(trl.grpo, name, value)
    for name, value in arguments.items():
        monkeypatch.setattr(trl.grpo.args, name, value)
    x = batch(config.loss_aggregation)
    loss, gradient, metrics = evaluate(x, config, [range(len(MASKS))])
    wanted_loss, wanted_gradient = trl_loss(trl.grpo, x)
    assert loss == pytest.approx(wanted_loss, abs=1e-6)
    assert torch.allclose(gradient, wanted_gradient, rtol=0, atol=1e-6)
    assert 0 < metrics["pg_clipfrac"] < 1  # the comparison reaches both branches


def generate(trainer: Any, x: ObjectiveInputs, rewards: Tensor) -> dict[str, Tensor]:
    """What TRL makes of completions, their engine log-probs and rewards."""
    lengths = [1 + i % LENGTH for i in range(len(MASKS))]
    completions = [[3] * n for n in lengths]
    rollout = [row[:n].tolist() for row, n in zip(padded(x.rollout_log_probs), lengths, strict=True)]
    tools = [mask[:n] for mask, n in zip(MASKS, lengths, strict=True)]
    prompts, texts = [[3]] * len(MASKS), ["a"] * len(MASKS)
    if trainer.__class__.__name__ == "GRPOTrainer":
        trainer._generate = lambda _: (prompts, completions, tools, texts, rollout, {}, None, None)
    else:
        trainer._generate = lambda _: (prompts, completions, texts)
    trainer._calculate_rewards = lambda *_: rewards.reshape(-1, 1)
    old = padded(x.old_log_probs)[:, : max(lengths)]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (old, None, None)
    return trainer._generate_and_score_completions([{"prompt": "a"} for _ in MASKS])


CORRECTIONS = {
    "token_truncate": {"method": "tis", "mode": "clip", "lower": 0.7, "upper": 1.4},
    "token_mask": {"method": "icepop", "lower": 0.7, "upper": 1.4},
    "sequence_truncate": {"method": "tis", "level": "sequence", "mode": "clip", "lower": 0.7, "upper": 1.4},
    "sequence_mask": {"method": "tis", "level": "sequence", "mode": "mask", "lower": 0.7, "upper": 1.4},
}


@pytest.mark.parametrize(("mode", "options"), CORRECTIONS.items(), ids=CORRECTIONS.keys())
def test_rollout_correction_equals_that_of_trl(
    trl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mode: str, options: dict[str, Any]
) -> None:
    settings = {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
    settings |= {"vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 1.4}
    for name, value in (settings | {"loss_type": "grpo"}).items():
        monkeypatch.setattr(trl.grpo, name, value)
    x = batch("sample_mean")
    weights = generate(trl.grpo, x, torch.randn(len(MASKS)))["importance_sampling_ratio"]
    loss, gradient, metrics = evaluate(x, AlgorithmConfig(off_policy=OffPolicyConfig(**options)), [range(len(MASKS))])
    wanted_loss, wanted_gradient = trl_loss(trl.grpo, x, weights)
    assert loss == pytest.approx(wanted_loss, abs=1e-6)
    assert torch.allclose(gradient, wanted_gradient, rtol=0, atol=1e-6)
    assert 0 < metrics["tis_clipfrac"] < 1


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_advantages_equal_those_of_trl(trl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    rewards = torch.randn(len(MASKS), generator=torch.Generator().manual_seed(5))
    rewards[:GROUP_SIZE] = 0.1  # a group without spread
    trainer = trl.rloo if estimator == "rloo" else trl.grpo
    if estimator != "rloo":
        monkeypatch.setattr(trainer, "scale_rewards", "group" if estimator == "grpo" else "none")
    wanted = generate(trainer, batch("sample_mean"), rewards)["advantages"].reshape(GROUPS, GROUP_SIZE)
    if estimator == "grpo":  # TRL adds 1e-4 to the standard deviation, we add 1e-6
        std = rewards.reshape(GROUPS, GROUP_SIZE).std(1, keepdim=True)
        wanted = wanted * (std + 1e-4) / (std + 1e-6)
    views = [SampleView(i, float(r), np.ones(1)) for i, r in enumerate(rewards)]
    groups = [views[i : i + GROUP_SIZE] for i in range(0, len(views), GROUP_SIZE)]
    found = compute_advantages(AlgorithmConfig(advantage_estimator=estimator), groups)
    assert np.concatenate(found) == pytest.approx(wanted.flatten().numpy(), abs=1e-6)


def test_overlong_penalty_equals_that_of_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = range(15)
    wanted = get_soft_overlong_punishment(max_completion_len=11, soft_punish_cache=5)([[0] * n for n in lengths])
    assert overlong_penalty(np.array(lengths), max_length=11, buffer=5).tolist() == pytest.approx(wanted)


def test_token_log_probs_and_entropy_equal_those_of_trl() -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = 3 * torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(9)
    log_probs, entropy = token_log_probs(logits, ids, temperature=0.6, with_entropy=True, chunk_size=4)
    assert torch.allclose(log_probs, selective_log_softmax(logits / 0.6, ids), atol=1e-6)
    assert torch.allclose(entropy, entropy_from_logits(logits / 0.6), atol=1e-6)


@pytest.mark.parametrize("k", [1, 4, 12])
def test_top_k_reverse_kl_equals_that_of_trl(k: int) -> None:
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    student, teacher = torch.randn(2, 5, 13, generator=torch.Generator().manual_seed(0))
    student = student.requires_grad_()
    wanted = compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=k, distillation_alpha=1.0, distillation_add_tail=True
    )
    entries = student.topk(k).indices
    log_probs = (torch.log_softmax(logits, -1).gather(-1, entries) for logits in (student, teacher))
    found = top_k_reverse_kl(*log_probs, torch.ones(5, dtype=torch.bool))
    assert torch.allclose(found, wanted, atol=1e-6)
    gradients = [torch.autograd.grad(loss.sum(), student)[0] for loss in (found, wanted)]
    assert torch.allclose(*gradients, atol=1e-6)


def test_full_reverse_kl_equals_that_of_trl() -> None:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    generator = torch.Generator().manual_seed(0)
    hidden, heads = torch.randn(2, 1, 5, 4, generator=generator), torch.randn(2, 7, 4, generator=generator)
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    wanted, _, _ = _chunked_divergence_loss(*hidden, *heads, mask, 1.0, temperature=0.8)
    student, teacher = (torch.log_softmax(h[0] @ w.T / 0.8, -1) for h, w in zip(hidden, heads, strict=True))
    found = top_k_reverse_kl(student, teacher, mask[0].bool()).sum() / mask.sum()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
