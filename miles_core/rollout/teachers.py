"""Teachers of on-policy distillation: models that say what they think of the policy's responses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from miles_core.config.run import RunConfig
from miles_core.data.tokenization import load_tokenizer
from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.types import TrainSample


class TeacherMismatchError(ValueError):
    """A teacher whose token ids mean something else than the policy's."""


@dataclass(frozen=True)
class TeacherScores:
    """One list entry a sample. Log-probs are of logits divided by the rollout temperature."""

    log_probs: list[np.ndarray]  # float32 [R], of the response tokens, mean over the teachers
    top_k_ids: list[np.ndarray] | None = None  # int32 [R, k], only for distill_top_k_coef
    top_k_log_probs: list[np.ndarray] | None = None  # float32 [R, k]


class Teacher(Protocol):
    """What the loop asks of the teachers, all of them together."""

    def score(self, batch: Sequence[TrainSample]) -> TeacherScores: ...


class EmbeddedTeachers:
    """Teachers in embedded engines of this process.

    Raises:
        TeacherMismatchError: a teacher's tokenizer or vocabulary differs from the policy's.
    """

    def __init__(self, config: RunConfig, policy_folder: Path) -> None:
        self._temperature = config.rollout.sampling.temperature
        self._top_k = config.distillation.top_k if config.algorithm.distill_top_k_coef else None
        folders = [Path(path) for path in config.distillation.teachers]
        for folder in folders:
            check_same_tokens(folder, policy_folder, self._top_k)
        self._engines = [EmbeddedEngine(folder, max_batch_tokens=config.rollout.max_batch_tokens) for folder in folders]

    def score(self, batch: Sequence[TrainSample]) -> TeacherScores:
        """Scores of the response tokens, in the order of the batch."""
        tokens = [s.tokens for s in batch]
        lengths = [s.response_length for s in batch]
        by_teacher = [engine.score(tokens, self._temperature) for engine in self._engines]
        means = [np.mean(scores, axis=0) for scores in zip(*by_teacher, strict=True)]
        log_probs = [_response(scores, n) for scores, n in zip(means, lengths, strict=True)]
        if self._top_k is None:
            return TeacherScores(log_probs)
        (engine,) = self._engines
        likeliest = engine.top_k(tokens, self._top_k, self._temperature)
        return TeacherScores(
            log_probs,
            [_response(ids, n) for (ids, _), n in zip(likeliest, lengths, strict=True)],
            [_response(values, n) for (_, values), n in zip(likeliest, lengths, strict=True)],
        )

    def close(self) -> None:
        """Frees the weights."""
        for engine in self._engines:
            engine.close()


def _response(per_token: np.ndarray, length: int) -> np.ndarray:
    """The last `length` rows: entry t of a sequence's scores belongs to token t + 1."""
    return per_token[len(per_token) - length :]


def check_same_tokens(teacher: Path, policy: Path, top_k: int | None) -> None:
    """Refuses a teacher that would score other tokens than the policy's, or has fewer than `top_k`.

    Raises:
        TeacherMismatchError: with the numbers of both.
    """
    theirs, ours = (json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (teacher, policy))
    if theirs != ours:
        raise TeacherMismatchError(
            f"distillation.teachers: {teacher} has a vocabulary of {theirs} tokens, the policy one of {ours}: "
            "their log-probs can not be compared"
        )
    if top_k is not None and top_k > theirs:
        raise TeacherMismatchError(f"distillation.top_k {top_k} exceeds the vocabulary of {theirs} tokens: lower it")
    teaching, learning = (load_tokenizer(folder).vocabulary() for folder in (teacher, policy))
    differing = sorted(t for t in teaching.keys() | learning.keys() if teaching.get(t) != learning.get(t))
    if differing:
        first = differing[0]
        raise TeacherMismatchError(
            f"distillation.teachers: the tokenizer of {teacher} gives {len(differing)} of {len(learning)} tokens other "
            f"ids than the policy's, among them {first!r} ({teaching.get(first)}, the policy's {learning.get(first)}): "
            "a teacher must share the policy's tokenizer"
        )
