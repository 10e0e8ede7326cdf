"""What Megatron cannot hold is refused before any process group is joined, all faults at once."""

from dataclasses import replace
from typing import Any

import pytest

from conversion.geometry import ModelGeometry, MoeGeometry, RopeGeometry
from miles_core.config.trainer import TrainerConfig
from miles_core.trainer.megatron.model_config import UnsupportedGeometryError, transformer_config

_DENSE = ModelGeometry(
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=101,
    max_position=128,
    norm_eps=1e-5,
    rope=RopeGeometry(theta=10_000.0, rotary_dim=16),
    tie_embeddings=False,
)
_MOE = MoeGeometry(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=32,
    is_moe_layer=(True,) * 4,
    score="sigmoid",
    router_bias=True,
    norm_topk=True,
)


def _build(geometry: ModelGeometry, ranks: int = 1, **parallel: int) -> Any:
    trainer = TrainerConfig.model_validate({"num_ranks": ranks, "parallel": parallel})
    return transformer_config(geometry, trainer, mtp_num_layers=0, routing_replay=False)


def test_what_fits_is_built() -> None:
    assert _build(_DENSE).num_layers == 4
    assert _build(replace(_DENSE, moe=_MOE), 4, expert=2, pipeline=2).num_moe_experts == 8


@pytest.mark.parametrize(
    ("geometry", "parallel", "message"),
    [
        (_DENSE, {"pipeline": 3}, r"4 layers are no multiple of trainer\.parallel\.pipeline 3"),
        (_DENSE, {"tensor": 4}, r"2 key-value heads are no multiple of trainer\.parallel\.tensor 4"),
        (_DENSE, {"expert": 2}, r"trainer\.parallel\.expert 2 on a model without experts"),
        (replace(_DENSE, moe=_MOE), {"expert": 3}, r"8 experts are no multiple of trainer\.parallel\.expert 3"),
        (replace(_DENSE, moe=replace(_MOE, norm_topk=False)), {}, "norm_topk=False with 2 experts a token"),
        (replace(_DENSE, moe=replace(_MOE, score="softmax")), {}, "a router bias with softmax scores"),
        (
            replace(_DENSE, moe=replace(_MOE, num_groups=4, topk_groups=2)),
            {},
            "top_k 2 over 2 groups: Megatron's router ranks groups by their best 1 experts, the model by their best 2",
        ),
        (replace(_DENSE, qk_norm="full"), {"tensor": 2}, "a norm over all query heads"),
        (replace(_DENSE, rope=replace(_DENSE.rope, scaling={"rope_type": "yarn"})), {}, "rope scaling 'yarn'"),
        (replace(_DENSE, rope=replace(_DENSE.rope, interleaved=True)), {}, "interleaved rope without latent attention"),
    ],
)
def test_what_does_not_is_refused(geometry: ModelGeometry, parallel: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=message):
        _build(geometry, max(parallel.values(), default=1), **parallel)


def test_all_faults_are_listed() -> None:
    geometry = replace(
        _DENSE, moe=replace(_MOE, norm_topk=False), rope=replace(_DENSE.rope, scaling={"rope_type": "yarn"})
    )
    with pytest.raises(UnsupportedGeometryError, match=r"pipeline 3.*norm_topk=False.*'yarn'"):
        _build(geometry, 3, pipeline=3)
