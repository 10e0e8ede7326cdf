"""Teachers of distillation against transformers, and those that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from conversion.random_model import make_random_model
from miles_core.config.run import RunConfig
from miles_core.rollout.teachers import EmbeddedTeachers, TeacherMismatchError
from miles_core.types import TrainSample

TEMPERATURE, K = 0.5, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policy and two teachers."""
    made = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        make_random_model(
            folder,
            num_layers=2,
            num_dense_layers=1,
            hidden_size=32,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            ffn_hidden_size=32,
            num_experts=4,
            top_k=2,
            moe_ffn_hidden_size=16,
            num_mtp_layers=0,
            max_position=32,
            seed=seed,
        )
        made.append(folder)
    return made


def config(teachers: list[Path], **algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"task": {}},
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
            "algorithm": {"advantage_estimator": "none", **algorithm},
            "distillation": {"teachers": [str(folder) for folder in teachers], "top_k": K},
        }
    )


def sample(tokens: list[int], response_length: int) -> TrainSample:
    per_token = np.ones(response_length, dtype=np.float32)
    return TrainSample(
        0, np.array(tokens, dtype=np.int32), response_length, per_token, per_token, per_token, -per_token
    )


BATCH = [sample([5, 9, 12, 40, 1], 3), sample([7, 8, 61], 1), sample([20, 30, 2, 4, 6, 8, 10], 6)]


def distributions(folder: Path, s: TrainSample) -> torch.Tensor:
    """log softmax of logits / temperature at the response tokens, [R, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(s.tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits[-1 - s.response_length : -1] / TEMPERATURE, -1)


@pytest.mark.parametrize("count", [1, 2])
def test_several_teachers_count_as_the_mean_of_their_log_probs(folders: list[Path], count: int) -> None:
    policy, teachers = folders[0], folders[1 : 1 + count]
    scores = EmbeddedTeachers(config(teachers, distill_kl_coef=1.0), policy).score(BATCH)
    assert scores.top_k_ids is None
    for s, found in zip(BATCH, scores.log_probs, strict=True):
        targets = torch.from_numpy(s.tokens[-s.response_length :].astype(np.int64)).unsqueeze(-1)
        each = [distributions(folder, s).gather(-1, targets).squeeze(-1) for folder in teachers]
        np.testing.assert_allclose(found, torch.stack(each).mean(0), atol=1e-5)
        assert found.dtype == np.float32


def test_the_likeliest_tokens_of_a_teacher(folders: list[Path]) -> None:
    scores = EmbeddedTeachers(config(folders[1:2], distill_top_k_coef=1.0), folders[0]).score(BATCH)
    assert scores.top_k_ids is not None and scores.top_k_log_probs is not None
    for s, ids, log_probs in zip(BATCH, scores.top_k_ids, scores.top_k_log_probs, strict=True):
        expected = distributions(folders[1], s).topk(K)
        assert (ids.shape, ids.dtype, log_probs.dtype) == ((s.response_length, K), np.int32, np.float32)
        assert ids.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(log_probs, expected.values, atol=1e-5)


def _larger_vocabulary(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 65}))


def _other_order(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"0": 6,', '"0": 7,').replace('"1": 7,', '"1": 6,'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_larger_vocabulary, "has a vocabulary of 65 tokens, the policy one of 64"),
        (_other_order, r"gives 2 of 64 tokens other ids than the policy's, among them '0' \(7, the policy's 6\)"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused(folders: list[Path], tmp_path: Path, change: Any, message: str) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(folders[1], teacher)
    change(teacher)
    with pytest.raises(TeacherMismatchError, match=message):
        EmbeddedTeachers(config([teacher], distill_kl_coef=1.0), folders[0])


def test_more_tokens_than_there_are_can_not_be_compared(folders: list[Path]) -> None:
    run = config(folders[1:2], distill_top_k_coef=1.0)
    run = run.model_copy(update={"distillation": run.distillation.model_copy(update={"top_k": 65})})
    with pytest.raises(TeacherMismatchError, match=r"distillation\.top_k 65 exceeds the vocabulary of 64 tokens"):
        EmbeddedTeachers(run, folders[0])
