"""The data that flows through a run: prompt, sample, group. Plain numpy, no torch.

One alignment holds for every per-token field. For a prompt of P = 3 tokens and a response of R = 2:

    index           0    1    2    3    4
    tokens          p0   p1   p2   r0   r1        length P + R
    loss_mask                      m0   m1        length R, entry i belongs to tokens[P + i]
    rollout_log_probs              l0   l1        length R, l_i = log p(tokens[P + i] | tokens[:P + i])
    routed_experts  e0   e1   e2   e3             length P + R - 1: the last token is never fed to the model

`routed_experts[t, layer, k]` is the k-th expert that decoder layer `layer` (counted from 0, dense layers included;
their rows are ignored) took for the token at index t.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np


class SampleStatus(StrEnum):
    """How a response ended."""

    COMPLETED = "completed"  # with a stop token
    TRUNCATED = "truncated"  # at the length limit
    ABORTED = "aborted"  # interrupted; may be continued
    FAILED = "failed"  # its reward or generation raised


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenized."""

    index: int  # row in the data set, unique
    text: str  # as rendered, for people
    token_ids: np.ndarray  # int32 [P]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, with everything that training needs to know of it."""

    group_index: int  # unique over the run: rollout_id * batch_size + position in the rollout
    index: int  # unique over the run: group_index * n_samples_per_prompt + position in the group
    prompt_index: int
    tokens: np.ndarray  # int32 [P + R]
    response_length: int  # R
    response: str
    status: SampleStatus
    loss_mask: np.ndarray  # uint8 [R], 1 on trainable tokens
    rollout_log_probs: np.ndarray  # float32 [R]
    weight_versions: np.ndarray  # int32 [R], version of the weights that sampled each token; -1: a given token
    routed_experts: np.ndarray | None = None  # int16 [P + R - 1, layers, top_k]
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        r, t = self.response_length, len(self.tokens)
        if not 0 <= r <= t:
            raise ValueError(f"sample {self.index}: response_length {r} does not fit {t} tokens")
        for name in ("loss_mask", "rollout_log_probs", "weight_versions"):
            if (found := len(getattr(self, name))) != r:
                raise ValueError(f"sample {self.index}: {name} has {found} entries, the response {r} tokens")
        if self.routed_experts is not None and len(self.routed_experts) != t - 1:
            raise ValueError(
                f"sample {self.index}: routed_experts has {len(self.routed_experts)} rows, "
                f"{t} tokens need {t - 1} (the last token is never fed to the model)"
            )

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length


@dataclass(frozen=True)
class Score:
    """What a scorer says of one response."""

    value: float  # the reward
    answer_found: bool = True  # False: the response holds no answer, which is counted apart from a wrong one


@dataclass(frozen=True)
class SampleGroup:
    """All responses to one prompt."""

    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if len({s.group_index for s in self.samples}) != 1:
            raise ValueError(f"a group holds samples of one prompt, found {[s.group_index for s in self.samples]}")

    @property
    def group_index(self) -> int:
        return self.samples[0].group_index


@dataclass(frozen=True)
class TrainSample:
    """What the trainer sees of a sample. R-long fields are aligned like those of `Sample`.

    Raises:
        ValueError: a per-token field is not R long; names the sample.
    """

    index: int
    tokens: np.ndarray  # int32 [T]
    response_length: int  # R
    loss_mask: np.ndarray  # uint8 [R]
    loss_weights: np.ndarray  # float32 [R]: share of each token in the loss of the global batch (aggregation.py)
    advantages: np.ndarray  # float32 [R]
    rollout_log_probs: np.ndarray  # float32 [R]
    old_log_probs: np.ndarray | None = None  # float32 [R]; None: the current policy's own, detached
    ref_log_probs: np.ndarray | None = None  # float32 [R]
    teacher_log_probs: np.ndarray | None = None  # float32 [R]
    teacher_top_k_ids: np.ndarray | None = None  # int32 [R, k], the teacher's likeliest tokens in place of each token
    teacher_top_k_log_probs: np.ndarray | None = None  # float32 [R, k]
    old_values: np.ndarray | None = None  # float32 [R], the critic's before the rollout's first step
    returns: np.ndarray | None = None  # float32 [R], what the critic learns
    routed_experts: np.ndarray | None = None  # int16 [T - 1, layers, top_k]

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name in ("index", "tokens", "response_length", "routed_experts"):
                continue
            value, length = getattr(self, item.name), self.response_length
            if value is not None and len(value) != length:
                raise ValueError(
                    f"sample {self.index}: {item.name} has {len(value)} entries, the response {length} tokens"
                )
