"""Routes of a rollout as rows of the trainer's pass."""

from dataclasses import replace

import numpy as np
import pytest

from conversion.geometry import ModelGeometry, MoeGeometry, RopeGeometry
from miles_core.batching.micro_batch import build_micro_batch
from miles_core.batching.sharding import MicroBatchPlan
from miles_core.routing_replay.alignment import OWN_CHOICE, RoutingReplayError, check_routes, with_routes
from miles_core.types import TrainSample

_GEOMETRY = ModelGeometry(
    architecture="Glm4MoeForCausalLM",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=101,
    max_position=128,
    norm_eps=1e-5,
    rope=RopeGeometry(theta=10_000.0, rotary_dim=8),
    tie_embeddings=False,
    moe=MoeGeometry(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=32,
        is_moe_layer=(False, True),
        score="sigmoid",
        router_bias=True,
        norm_topk=True,
    ),
)


def _sample(index: int, length: int, routes: np.ndarray | None) -> TrainSample:
    one = np.ones(1, dtype=np.float32)
    return TrainSample(
        index=index,
        tokens=np.arange(1, length + 1, dtype=np.int32),
        response_length=1,
        loss_mask=np.ones(1, dtype=np.uint8),
        loss_weights=one,
        advantages=one,
        rollout_log_probs=-one,
        routed_experts=routes,
    )


def _routes(rows: list[list[int]]) -> np.ndarray:
    """One MoE layer's rows; the dense layer 0 holds 99, which no rule may read."""
    dense = np.full((len(rows), 1, 2), 99)
    return np.concatenate([dense, np.array(rows)[:, None]], axis=1).astype(np.int16)


_BATCH = [
    _sample(7, 3, _routes([[0, 1], [2, 3]])),
    _sample(8, 4, _routes([[3, 2], [1, 0], [0, 2]])),
]
_PLAN = MicroBatchPlan((0, 1), rows=2, row_length=4, total_length=8)
_NONE = [OWN_CHOICE, OWN_CHOICE]


def test_packed_rows() -> None:
    """Sample 7's three rows, sample 8's four, one of padding; last tokens and padding choose for themselves."""
    aligned = with_routes(build_micro_batch(_BATCH, _PLAN, packing=True), _BATCH).routed_experts
    assert aligned is not None
    assert aligned[:, 1].tolist() == [[0, 1], [2, 3], _NONE, [3, 2], [1, 0], [0, 2], _NONE, _NONE]


def test_padded_rows() -> None:
    """Position by position, as the model's hidden states lie."""
    aligned = with_routes(build_micro_batch(_BATCH, _PLAN, packing=False), _BATCH).routed_experts
    assert aligned is not None
    assert aligned[:, 1].tolist() == [[0, 1], [3, 2], [2, 3], [1, 0], _NONE, [0, 2], _NONE, _NONE]


def test_a_rank_without_samples_has_only_its_own_choices() -> None:
    micro_batch = with_routes(build_micro_batch(_BATCH, MicroBatchPlan((), 1, 3, 3), packing=True), _BATCH)
    assert micro_batch.routed_experts is not None
    assert (micro_batch.routed_experts == OWN_CHOICE).all()


def test_good_routes_pass_whatever_the_dense_layer_holds() -> None:
    check_routes(_BATCH, _GEOMETRY)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, r"sample 8 has no routed_experts.*trainer\.routing_replay=false"),
        (_routes([[0, 1], [2, 3]]), r"sample 8: .*\(2, 2, 2\), its 4 tokens and the model need \(3, 2, 2\)"),
        (_routes([[0, 1], [2, 3], [0, 1]])[:, 1:], r"sample 8: .*\(3, 1, 2\)"),
        (_routes([[0, 1], [2, 3], [0, 1]])[..., :1], r"sample 8: .*\(3, 2, 1\)"),
        (_routes([[0, 1], [2, 4], [0, 1]]), "sample 8: routed_experts holds expert 4, the model has experts 0 to 3"),
        (_routes([[0, 1], [2, 3], [-1, 1]]), "sample 8: routed_experts holds expert -1"),
    ],
)
def test_bad_routes_name_the_sample(routes: np.ndarray | None, message: str) -> None:
    with pytest.raises(RoutingReplayError, match=message):
        check_routes([_BATCH[0], replace(_BATCH[1], routed_experts=routes)], _GEOMETRY)
