"""Models and layouts that the Megatron trainer cannot hold are refused with value, rule and option, before torch."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from conversion.geometry import MlaGeometry, ModelGeometry, MoeGeometry, RopeGeometry
from miles_core.config.preflight_layout import layout_faults, stage_layers
from miles_core.config.trainer import TrainerConfig

_DENSE = ModelGeometry(
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=101,
    max_position=128,
    norm_eps=1e-5,
    rope=RopeGeometry(theta=10_000.0, rotary_dim=16),
    tie_embeddings=False,
)
_ROUTED = MoeGeometry(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=32,
    is_moe_layer=(True,) * 4,
    score="sigmoid",
    router_bias=True,
    norm_topk=True,
    shared_ffn_hidden_size=34,
)
_MOE = replace(_DENSE, moe=_ROUTED)
_MLA = replace(_DENSE, num_kv_heads=8, mla=MlaGeometry(18, 20, 12, 4, 16))


def _faults(geometry: ModelGeometry, **parallel: int) -> list[str]:
    ranks = 1
    for size in parallel.values():
        ranks *= size
    return layout_faults(geometry, TrainerConfig.model_validate({"num_ranks": ranks, "parallel": parallel}))


@pytest.mark.parametrize(
    ("geometry", "parallel"),
    [
        (_DENSE, {}),
        (_DENSE, {"tensor": 2, "context": 4, "pipeline": 2}),  # 2 key-value heads for 4 ranks: repeated
        (replace(_DENSE, num_layers=61), {"pipeline": 16}),
        (_MOE, {"tensor": 2, "context": 2, "expert": 8, "pipeline": 4}),
        (_MLA, {"tensor": 2, "context": 2}),
        (replace(_DENSE, rope=replace(_DENSE.rope, interleaved=True)), {}),
    ],
)
def test_what_fits(geometry: ModelGeometry, parallel: dict[str, int]) -> None:
    assert _faults(geometry, **parallel) == []


@pytest.mark.parametrize(
    ("geometry", "parallel", "fault"),
    [
        (_DENSE, {"pipeline": 3}, "4 layers in stages of 2 leave none to the last of trainer.parallel.pipeline 3"),
        (_DENSE, {"tensor": 4}, "2 key-value heads are no multiple of trainer.parallel.tensor 4"),
        (_DENSE, {"context": 3}, "8 query heads are no multiple of trainer.parallel.tensor 1 x context 3"),
        (replace(_DENSE, ffn_hidden_size=97), {"tensor": 2}, "an MLP width of 97 is no multiple of"),
        (_DENSE, {"expert": 2}, "trainer.parallel.expert 2 on a model without experts; set it to 1"),
        (_MOE, {"expert": 3}, "8 experts are no multiple of trainer.parallel.expert 3"),
        (
            replace(_MOE, num_kv_heads=8),
            {"tensor": 4},
            "a shared expert's width of 34 is no multiple of trainer.parallel.tensor 4",
        ),
        (_MLA, {"tensor": 4}, "a latent query width of 18 is no multiple of trainer.parallel.tensor 4"),
        (replace(_DENSE, qk_norm="full"), {"tensor": 2}, "a norm over all query heads with trainer.parallel.tensor 2"),
        (replace(_MOE, moe=replace(_ROUTED, norm_topk=False)), {}, "norm_topk=False with 2 experts a token"),
        (replace(_MOE, moe=replace(_ROUTED, score="softmax")), {}, "a router bias with softmax scores"),
        (
            replace(_MOE, moe=replace(_ROUTED, num_groups=4, topk_groups=2)),
            {},
            "top_k 2 over 2 groups: Megatron's router ranks groups by their best 1 experts, the model by their best 2",
        ),
    ],
)
def test_what_does_not_fit(geometry: ModelGeometry, parallel: dict[str, int], fault: str) -> None:
    (found, *others) = _faults(geometry, **parallel)
    assert fault in found
    assert others == []


def test_all_faults_are_listed() -> None:
    found = _faults(replace(_MOE, moe=replace(_ROUTED, norm_topk=False)), pipeline=3, tensor=4)
    assert [fault.split(" ")[0] for fault in found] == ["2", "4", "a", "norm_topk=False"]


@pytest.mark.parametrize(
    ("trainer", "fault"),
    [
        (
            {"num_ranks": 12, "parallel": {"tensor": 2, "context": 2, "pipeline": 2}},
            "trainer.num_ranks 12 is not a multiple of trainer.parallel.tensor 2 x context 2 x pipeline 2 = 8",
        ),
        (
            {"num_ranks": 8, "parallel": {"pipeline": 2, "expert": 8}},
            "trainer.parallel.expert 8 does not divide the 4 ranks of a pipeline stage",
        ),
    ],
)
def test_what_no_model_fits(trainer: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        TrainerConfig.model_validate(trainer)


def test_the_last_stage_has_fewer_layers() -> None:
    assert [len(stage) for stage in stage_layers(61, 8)] == [8, 8, 8, 8, 8, 8, 8, 5]
    assert stage_layers(4, 2) == [range(2), range(2, 4)]
