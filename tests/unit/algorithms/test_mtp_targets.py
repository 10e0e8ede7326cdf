"""What the multi-token prediction layers learn, in every layout of a batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_core.algorithms.mtp import finalize_mtp_metrics, mtp_objective
from miles_core.batching.micro_batch import MicroBatch, build_micro_batch
from miles_core.batching.sharding import MicroBatchPlan
from miles_core.types import TrainSample

A, B, C, D, E, F, G = range(1, 8)


def _sample(tokens: list[int], trainable: list[int]) -> TrainSample:
    """All but the first token are the response: nothing scores the first one."""
    count = len(tokens) - 1
    zeros = np.zeros(count, dtype=np.float32)
    return TrainSample(
        index=0,
        tokens=np.array(tokens, dtype=np.int32),
        response_length=count,
        loss_mask=np.array(trainable[1:], dtype=np.uint8),
        loss_weights=zeros,
        advantages=zeros,
        rollout_log_probs=zeros,
    )


FIRST, SECOND = _sample([A, B, C], [1] * 3), _sample([D, E, F, G], [1] * 4)
WITHOUT_F = _sample([D, E, F, G], [1, 1, 0, 1])


def _batch(samples: list[TrainSample], *, packing: bool, length: int) -> MicroBatch:
    plan = MicroBatchPlan(samples=tuple(range(len(samples))), rows=len(samples), row_length=length, total_length=length)
    return build_micro_batch(samples, plan, packing=packing)


def targets(batch: MicroBatch, depth: int = 1) -> list[tuple[int, int]]:
    """(token at the place from which the layer predicts, what it learns to say there), in order."""
    positions, exists = batch.earlier_positions(depth)
    trained = batch.loss_mask & exists
    places = batch.tokens.T.flatten()  # flat places of hidden states [S, B]
    return list(zip(places[positions][trained].tolist(), batch.targets[trained].tolist(), strict=True))


LAYOUTS = [(True, 7), (True, 8), (False, 4), (False, 6)]  # packed, packed and padded to 8 slots, rows, longer rows


@pytest.mark.parametrize(("packing", "length"), LAYOUTS)
def test_targets_stay_in_their_sequence(packing: bool, length: int) -> None:
    assert targets(_batch([FIRST, SECOND], packing=packing, length=length)) == [(A, C), (D, F), (E, G)]


@pytest.mark.parametrize(("packing", "length"), LAYOUTS)
def test_a_masked_token_is_no_target(packing: bool, length: int) -> None:
    assert targets(_batch([FIRST, WITHOUT_F], packing=packing, length=length)) == [(A, C), (E, G)]


def test_alone_and_together_are_equal() -> None:
    alone = [t for s in (FIRST, SECOND) for t in targets(_batch([s], packing=True, length=len(s.tokens)))]
    assert alone == targets(_batch([FIRST, SECOND], packing=True, length=7))


@pytest.mark.parametrize(("depth", "expected"), [(2, [(D, G)]), (3, []), (9, [])])
@pytest.mark.parametrize(("packing", "length"), LAYOUTS)
def test_deeper_layers_look_further(packing: bool, length: int, depth: int, expected: list[tuple[int, int]]) -> None:
    assert targets(_batch([FIRST, SECOND], packing=packing, length=length), depth) == expected


def test_a_prompt_lies_before_the_targets() -> None:
    """With a b as the prompt, c is predicted from a, in the prompt; a prompt token is never a target."""
    sample = replace(
        FIRST, response_length=1, **{f: getattr(FIRST, f)[1:] for f in ("loss_mask", "loss_weights", "advantages")},
        rollout_log_probs=FIRST.rollout_log_probs[1:],
    )  # fmt: skip
    assert targets(_batch([sample], packing=True, length=3)) == [(A, C)]


def test_loss_and_metrics_by_hand() -> None:
    """Two micro-batches: weights 0.5 and 0.25 trained, 9 not; log-probs -1 and -2; one of two agrees."""
    first = mtp_objective(
        torch.tensor([-1.0, torch.inf]), torch.tensor([True, True]), torch.tensor([True, False]),
        torch.tensor([0.5, 9.0]), depth=1,
    )  # fmt: skip
    second = mtp_objective(
        torch.tensor([-2.0]), torch.tensor([False]), torch.tensor([True]), torch.tensor([0.25]), depth=1
    )
    assert first[0] + second[0] == 1.0
    sums = {name: float(first[1][name] + second[1][name]) for name in first[1]}
    final = finalize_mtp_metrics(sums | {"loss": 7.0})
    assert final == pytest.approx({"mtp_1_loss": 1.0 / 0.75, "mtp_1_agreement": 0.5 / 0.75, "mtp_1_targets": 2.0})


def test_a_batch_without_targets_is_finite() -> None:
    empty = torch.empty(0)
    loss, sums = mtp_objective(empty, empty.bool(), empty.bool(), empty, depth=1)
    assert loss == 0
    assert finalize_mtp_metrics({n: float(v) for n, v in sums.items()})["mtp_1_loss"] == 0
