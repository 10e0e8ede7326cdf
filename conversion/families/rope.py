"""Rotary embedding as config.json describes it, in its old keys or the newer `rope_parameters`."""

from typing import Any

from conversion.families.config_reader import ConfigReader
from conversion.geometry import RopeGeometry

# What each type is parametrised by. The types that change with the sequence length ("dynamic", "longrope") are left
# out: a token's position would depend on how much was generated after it, and training could not reproduce it.
_MSCALE = {"attention_factor", "mscale", "mscale_all_dim"}
_SCALING_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"} | _MSCALE,
}


def read_rope(
    config: ConfigReader,
    width: int,
    *,
    theta: float = 10_000.0,
    partial: float = 1.0,
    may_be_partial: bool = False,
    interleaved: bool = False,
) -> RopeGeometry:
    """Old style: rope_theta, rope_scaling, partial_rotary_factor. New style: rope_parameters.

    Values inside the dictionary win over those beside it, and `rope_scaling` over `rope_parameters`.

    Args:
        config: config.json.
        width: dims of a head that could be rotated.
        theta: base of the frequencies where config.json has none.
        partial: share of `width` that is rotated where config.json has none.
        may_be_partial: whether the family supports a share below 1.
        interleaved: see RopeGeometry.
    """
    new_style, old_style = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    beside = {
        "rope_theta": config.get("rope_theta", theta),
        "partial_rotary_factor": config.get("partial_rotary_factor", partial),
    }
    return rope_from_parameters(
        config, beside | (old_style or new_style), width, may_be_partial=may_be_partial, interleaved=interleaved
    )


def rope_from_parameters(
    config: ConfigReader,
    parameters: dict[str, Any],
    width: int,
    *,
    may_be_partial: bool = False,
    interleaved: bool = False,
) -> RopeGeometry:
    """A complete `rope_parameters` dictionary as geometry; see `read_rope` for the arguments."""
    scaling = dict(parameters)
    theta = float(scaling.pop("rope_theta"))
    partial = scaling.pop("partial_rotary_factor", 1.0)
    if not 0 < partial <= 1 or (partial != 1 and not may_be_partial):
        config.refuse(
            f"partial_rotary_factor is {partial}, supported: {'0 < factor <= 1' if may_be_partial else '1.0'}"
        )
    rotary_dim = int(width * partial)
    if rotary_dim % 2:
        config.refuse(f"{rotary_dim} dims of a head are rotated, the number must be even")
    alias = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", alias)
    if rope_type not in _SCALING_KEYS:
        config.refuse(f"rope_type is {rope_type!r}, supported: {', '.join(map(repr, _SCALING_KEYS))}")
    else:
        for key in sorted(scaling.keys() - _SCALING_KEYS[rope_type]):
            config.refuse(f"rope parameter {key} = {scaling[key]!r} is not known to rope_type {rope_type!r}")
        if rope_type != "default" and not isinstance(scaling.get("factor"), int | float):
            config.refuse(f"rope_type {rope_type!r} needs a number as its factor, found {scaling.get('factor')!r}")
    if rope_type in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", config.size("max_position_embeddings"))
    return RopeGeometry(
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=None if rope_type == "default" else {"rope_type": rope_type, **scaling},
    )
