"""The tensors of one forward pass, padded or packed, with every per-token field at its logits position.

Two samples, [p0 p1 r0] and [p0 p1 r0 r1] (P = 2), as flat hidden states that the model returns:

    padded  [4, 2] = [length, rows], read row by row:     packed [7, 1]:
        flat   0  1  2  3  4  5  6  7                         flat   0  1  2  3  4  5  6
        sample 0  1  0  1  0  1  -  1                         sample 0  0  0  1  1  1  1
        token  p0 p0 p1 p1 r0 r0 .  r1                        token  p0 p1 r0 p0 p1 r0 r1
        scores       r0 r0    r1                              scores    r0       r0 r1

The state at a token scores the token after it, so `logit_positions` is [2, 3, 5] or [1, 4, 5] for `targets`
[r0, r0, r1], which are the response tokens of the samples in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from miles_core.batching.sharding import MicroBatchPlan
from miles_core.types import TrainSample


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences lie that were laid end to end; padding at the end counts as one more sequence."""

    count: int  # sequences
    longest: int  # tokens
    offsets: Tensor  # int32 [count + 1], offsets[i] is the first token of sequence i, the last one is the total length
    places: Tensor  # int64 [total], where each token would lie in rows of `longest`, flat: row * longest + position


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. B x S tokens, of which N are response tokens of n samples. B = 1 where packed."""

    samples: tuple[int, ...]  # positions in the batch, in order
    response_lengths: tuple[int, ...]  # of each sample; they add up to N
    tokens: Tensor  # int64 [B, S]
    packed: PackedLayout | None
    fed_rows: Tensor  # int64 [sum(T_i - 1)], flat place of each sample's tokens but the last, which no engine fed
    logit_positions: Tensor  # int64 [N], or [n] where `scored` is given, flat
    targets: Tensor  # int64 [N]
    sequence_ids: Tensor  # int64 [N], which sample, counted within this micro-batch
    loss_mask: Tensor  # bool [N]
    loss_weights: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N]
    rollout_log_probs: Tensor  # float32 [N]
    old_log_probs: Tensor | None  # float32 [N]
    ref_log_probs: Tensor | None  # float32 [N]
    teacher_top_k_ids: Tensor | None  # int64 [N, k]
    teacher_top_k_log_probs: Tensor | None  # float32 [N, k]
    old_values: Tensor | None  # float32 [N]
    returns: Tensor | None  # float32 [N]
    routed_experts: Tensor | None = None  # int16 [S * B, layers, top_k], flat; see routing_replay/alignment.py
    scored: Tensor | None = None  # int64 [n], which of the N this context-parallel part scores; see batching/context.py

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""

        return _moved(self, device)

    def earlier_positions(self, places: int) -> tuple[Tensor, Tensor]:
        """Where the states lie that are `places` before `logit_positions` in the same sequence.

        Returns flat positions int64 [N], and bool [N]: False where the sequence has no such place (the position is 0).
        """
        rows = self.tokens.shape[0]
        if self.packed is None:
            in_sequence = self.logit_positions // rows
        else:
            in_sequence = self.packed.places[self.logit_positions] % self.packed.longest
        exists = in_sequence >= places
        return torch.where(exists, self.logit_positions - places * rows, 0), exists

    def split(self, per_token: Tensor) -> list[Tensor]:
        """Values of the response tokens [N] as one tensor [R] for each sample."""
        return list(per_token.split(self.response_lengths))


def _moved(record: Any, device: torch.device) -> Any:
    """A copy of a dataclass with its tensors, and those of dataclasses in it, on `device`."""
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            changes[field.name] = _moved(value, device)
        elif isinstance(value, Tensor):
            changes[field.name] = value.to(device)
    return replace(record, **changes)


def build_micro_batch(
    batch: Sequence[TrainSample], plan: MicroBatchPlan, *, packing: bool, length_multiple: int = 1
) -> MicroBatch:
    """Lays out the samples of `plan`. Its shape is that of the largest rank, so that ranks can exchange tokens.

    Args:
        batch: the whole batch; `plan` holds positions in it.
        plan: which samples, and the common shape.
        packing: end to end, or one row each.
        length_multiple: S is a multiple of this (tensor- and context-parallel ranks share the sequence evenly).

    Raises:
        ValueError: a response starts at the first token, so that nothing scores it; or only some of the samples have
            an optional field.
    """
    samples = [batch[i] for i in plan.samples]
    for sample in samples:
        if sample.response_length == len(sample.tokens):
            raise ValueError(
                f"sample {sample.index} has no prompt token: nothing scores its first response token; "
                "give every prompt at least one token"
            )
    lengths = np.array([len(s.tokens) for s in samples], dtype=np.int64)
    responses = np.array([s.response_length for s in samples], dtype=np.int64)
    number, position = _number_and_position(lengths)
    if packing:
        rows, length = 1, _round_up(plan.total_length, length_multiple)
        row, column = np.zeros_like(number), np.arange(len(number))
    else:
        rows, length = plan.rows, _round_up(plan.row_length, length_multiple)
        row, column = number, position
    flat = column * rows + row
    sample_tokens = _join([s.tokens for s in samples], np.int64)
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    tokens[torch.from_numpy(row), torch.from_numpy(column)] = sample_tokens
    is_last = position == lengths[number] - 1
    is_response = position >= (lengths - responses)[number]

    return MicroBatch(
        samples=plan.samples,
        response_lengths=tuple(responses.tolist()),
        tokens=tokens,
        packed=_packed_layout(lengths, length) if packing else None,
        fed_rows=torch.from_numpy(flat[~is_last]),
        logit_positions=torch.from_numpy(flat[np.flatnonzero(is_response) - 1]),
        targets=sample_tokens[torch.from_numpy(is_response)],
        sequence_ids=torch.from_numpy(number[is_response]),
        loss_mask=_join([s.loss_mask for s in samples], np.bool_),
        loss_weights=_join([s.loss_weights for s in samples], np.float32),
        advantages=_join([s.advantages for s in samples], np.float32),
        rollout_log_probs=_join([s.rollout_log_probs for s in samples], np.float32),
        old_log_probs=_join_optional(samples, "old_log_probs"),
        ref_log_probs=_join_optional(samples, "ref_log_probs"),
        teacher_top_k_ids=_join_optional(samples, "teacher_top_k_ids", np.int64),
        teacher_top_k_log_probs=_join_optional(samples, "teacher_top_k_log_probs"),
        old_values=_join_optional(samples, "old_values"),
        returns=_join_optional(samples, "returns"),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _number_and_position(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For sequences laid end to end: which sequence each token belongs to, and where in it. int64 [sum of lengths]."""
    number = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return number, np.arange(len(number)) - starts[number]


def _packed_layout(lengths: np.ndarray, total: int) -> PackedLayout:
    if padding := total - int(lengths.sum()):
        lengths = np.append(lengths, padding)
    number, position = _number_and_position(lengths)
    longest = int(lengths.max())
    return PackedLayout(
        count=len(lengths),
        longest=longest,
        offsets=torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
        places=torch.from_numpy(number * longest + position),
    )


def _join(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(p) for p in parts] or [np.empty(0)]).astype(dtype))


def _join_optional(samples: Sequence[TrainSample], field: str, dtype: type = np.float32) -> Tensor | None:
    values = [getattr(s, field) for s in samples]
    if all(v is None for v in values):
        return None
    if missing := [s.index for s, v in zip(samples, values, strict=True) if v is None]:
        raise ValueError(f"{field}: samples {missing} have none while others of the same batch do; give all or none")
    return _join(values, dtype)
