"""Which way weights take, and which ways are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.config.run import RunConfig
from miles_core.weight_sync.transport import transport_of

SGLANG = {"engine": "sglang"}


def run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"random": {}}, "data": {"task": {}}} | sections)


def sglang(**settings: Any) -> dict[str, Any]:
    return SGLANG | {"sglang": settings}


@pytest.mark.parametrize(
    ("sections", "transport"),
    [
        ({}, "host"),
        ({"weight_sync": {"transport": "broadcast"}}, "broadcast"),
        ({"rollout": SGLANG}, "ipc"),
        ({"rollout": SGLANG, "weight_sync": {"transport": "host"}}, "host"),
        ({"rollout": SGLANG, "cluster": {"address": "http://head:8265"}}, "broadcast"),
        ({"rollout": SGLANG, "cluster": {"address": "http://head:8265"}, "quantize": {"format": "int4"}}, "host"),
    ],
)
def test_auto_takes_the_fastest_way_there_is(sections: dict, transport: str) -> None:
    assert transport_of(run(**sections)) == transport


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"weight_sync": {"transport": "ipc"}},
            "weight_sync.transport=ipc needs rollout.engine=sglang, found embedded",
        ),
        (
            {"rollout": {"sglang": {"release_in_training": ["kv_cache"]}}},
            r"rollout.sglang.release_in_training \['kv_cache'\] needs rollout.engine=sglang, found embedded",
        ),
        (
            {
                "rollout": sglang(server_args={"speculative_algorithm": "NEXTN"}),
                "weight_sync": {"transport": "broadcast"},
            },
            "transport=broadcast would leave the draft model of speculative_algorithm behind; set weight_sync",
        ),
        (
            {"rollout": SGLANG, "quantize": {"format": "int4"}, "weight_sync": {"transport": "broadcast"}},
            "transport=broadcast can not bring quantize.format=int4",
        ),
        (
            {"rollout": sglang(release_in_training=["weights"], server_args={"speculative_algorithm": "NEXTN"})},
            "release_in_training with weights loses the draft model",
        ),
        (
            {"rollout": sglang(server_args={"pp_size": 2})},
            "rollout.sglang.server_args pp_size=2: weights reach the ranks of tensor parallelism alone",
        ),
        (
            {"rollout": sglang(server_args={"dp_size": 2})},
            "rollout.sglang.server_args dp_size=2: weights reach the ranks of tensor parallelism alone",
        ),
    ],
)
def test_ways_that_lose_weights_are_refused(sections: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run(**sections)


def test_attention_by_data_parallelism_is_within_tensor_parallelism() -> None:
    args = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
    assert run(rollout=sglang(server_args=args)).rollout.sglang.num_ranks == 4
