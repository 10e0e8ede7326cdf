"""Keys are equal for equal inputs, in every process, and never made from what can not be written down."""

import os
import subprocess
import sys
from typing import Any

import pytest

from tasks.cache_key import CacheKeyError, stage_key

PARAMS = {"lr": 1e-3, "layers": [1, 2], "section": {"b": True, "a": None}}
INPUTS = {"model": "aa", "rollout_model": "bb"}
KEY = stage_key("train", 1, PARAMS, INPUTS)


def test_order_of_mappings_does_not_matter() -> None:
    reordered = {"section": {"a": None, "b": True}, "layers": (1, 2), "lr": 0.001}
    assert stage_key("train", 1, reordered, dict(reversed(INPUTS.items()))) == KEY


@pytest.mark.parametrize(
    "other",
    [
        ("export", 1, PARAMS, INPUTS),
        ("train", 2, PARAMS, INPUTS),
        ("train", 1, {**PARAMS, "lr": 2e-3}, INPUTS),
        ("train", 1, {**PARAMS, "layers": [2, 1]}, INPUTS),
        ("train", 1, {**PARAMS, "section": {"b": 1, "a": None}}, INPUTS),
        ("train", 1, PARAMS, {**INPUTS, "model": "ab"}),
        ("train", 1, PARAMS, {"model": "bb", "rollout_model": "aa"}),
        ("train", 1, PARAMS, {"model": "aa"}),
    ],
)
def test_every_part_counts(other: tuple[str, int, dict[str, Any], dict[str, str]]) -> None:
    assert stage_key(*other) != KEY


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_key_is_the_same_in_another_process(hash_seed: str) -> None:
    code = f"from tasks.cache_key import stage_key; print(stage_key('train', 1, {PARAMS!r}, {INPUTS!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == KEY


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "params.a.b"),
        (float("nan"), "params.a.b"),
        (float("inf"), "params.a.b"),
        ({1, 2}, "params.a.b"),
        (b"x", "params.a.b"),
        ([0, object()], r"params.a.b\[1\]"),
        ({1: "x"}, "params.a.b"),
    ],
)
def test_what_has_no_stable_text_is_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(CacheKeyError, match=f"train: {where}"):
        stage_key("train", 1, {"a": {"b": value}}, {})


def test_open_handles_give_an_error_instead_of_an_equal_key() -> None:
    with open(os.devnull) as first, open(os.devnull) as second:
        for handle in (first, second):
            with pytest.raises(CacheKeyError, match=r"params.handle is .*TextIOWrapper"):
                stage_key("download", 1, {"handle": handle}, {})
