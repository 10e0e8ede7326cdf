"""Under which keys a torch_dist checkpoint holds the model's tensors. No torch.

One layout for every model that we write: megatron-core's `singleton_local_shards`. Each layer and each expert has keys
of its own, and a gated linear_fc1 has two, the gate (`_w`) and the up projection (`_v`), so any tensor, expert and
pipeline parallel size can read it. A GPTModel must therefore be loaded (and is best saved) with

    model.sharded_state_dict(metadata=sharded_state_dict_metadata())

megatron-core's other layouts are read as well: layers stacked along a leading axis (its default for homogeneous
models) and experts stacked along one (its default for a MoE).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conversion.geometry import ModelGeometry

_LAYER = r"^((?:decoder\.layers|mtp\.layers)\.\d+\.(?:transformer_layer\.)?)"
# The local layer spec stores its norms under the names that a fused norm-and-linear layer would have
# (`sharded_state_dict_keys_map` in megatron.core.models.gpt.gpt_layer_specs); the spec of MLA does not.
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_TO_FUSED = [(re.compile(_LAYER + re.escape(plain)), rf"\1{fused}") for plain, fused in _FUSED_NORMS.items()]
_TO_PLAIN = [(re.compile(_LAYER + re.escape(fused)), rf"\1{plain}") for plain, fused in _FUSED_NORMS.items()]

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_GATED = re.compile(r"\.linear_fc1\.(?:weight|bias)$")
_LINEAR = re.compile(r"\.(?:linear_\w+|eh_proj)\.weight$")

_EXPERT_KEY = re.compile(r"\.mlp\.experts\.experts\.(\d+)\.")
_HALF_KEY = re.compile(r"\.linear_fc1\.(?:weight|bias)_([wv])$")
_STACKED = {
    re.compile(r"^decoder\.layers\.(?!\d+\.)"): "decoder.layers.{}.",
    re.compile(r"\.mlp\.experts\.experts\.(?!\d+\.)"): ".mlp.experts.local_experts.{}.",
}


def sharded_state_dict_metadata() -> dict[str, Any]:
    """The `metadata` argument of `sharded_state_dict`, and the `content_metadata` of a checkpoint in our layout.

    A new dictionary each time, because megatron-core adds process groups to the one it is given.
    """
    return {"singleton_local_shards": True}


def sharded_keys(name: str, geometry: ModelGeometry) -> tuple[str, ...]:
    """Keys of the whole Megatron tensor `name`: its parts along axis 0, of equal size, in this order."""
    key = _EXPERT.sub(r".mlp.experts.experts.\1.", name)
    if geometry.mla is None:
        for plain, fused in _TO_FUSED:
            key = plain.sub(fused, key)
    return (f"{key}_w", f"{key}_v") if _GATED.search(key) else (key,)


def extra_state_key(name: str) -> str | None:
    """Key of the (empty) object that megatron-core's linear layers expect beside the weight `name`."""
    if not _LINEAR.search(name):
        return None
    module = _EXPERT.sub(r".mlp.experts.experts.\1.", name).removesuffix("weight")
    return f"{module}_extra_state/shard_0_1"


@dataclass(frozen=True)
class Part:
    """`stored[leading]` is a part of the Megatron tensor `name`; parts are joined along axis 0 by `order`."""

    name: str
    order: int
    leading: tuple[int, ...]


def parts_under(key: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """What a key of any of megatron-core's layouts holds; the inverse of `sharded_keys`.

    Args:
        key: of a model tensor, without a prefix that a training run may have put before all of them.
        shape: of the stored tensor, stacked axes included.
    """
    order, name = 0, key
    if half := _HALF_KEY.search(key):
        order, name = "wv".index(half[1]), key[:-2]
    name = _EXPERT_KEY.sub(r".mlp.experts.local_experts.\1.", name)
    found: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    for stacked, numbered in _STACKED.items():
        if stacked.search(name):
            found = [
                (stacked.sub(numbered.format(i), one), (*leading, i))
                for one, leading in found
                for i in range(shape[len(leading)])
            ]
    for one, leading in found:
        for fused, plain in _TO_PLAIN:
            one = fused.sub(plain, one)
        yield Part(one, order, leading)
