"""The key of a stage's result: equal for equal inputs, in every process and on every machine."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

_DIGITS = 32  # 128 bits


class CacheKeyError(TypeError):
    """A value from which no stable key can be made. There is no falling back to a key without it."""


def stage_key(stage: str, version: int, params: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Hex digest over the stage, the version of its code, the configuration it reads, and the digests of its inputs.

    Raises:
        CacheKeyError: `params` holds something else than JSON values with string keys and finite numbers.
    """
    _require_json(params, f"{stage}: params")
    content = {"stage": stage, "version": version, "params": params, "inputs": dict(inputs)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _require_json(value: Any, where: str) -> None:
    # json.dumps alone would accept too much: it turns the key 1 into "1" and writes NaN.
    match value:
        case None | bool() | int() | str():
            return
        case float() if math.isfinite(value):
            return
        case Mapping():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise CacheKeyError(f"{where} has the key {key!r}; only strings have a stable order")
                _require_json(item, f"{where}.{key}")
        case list() | tuple():
            for index, item in enumerate(value):
                _require_json(item, f"{where}[{index}]")
        case _:
            raise CacheKeyError(
                f"{where} is {value!r} ({type(value).__name__}); a cache key takes JSON values and finite numbers"
            )
