"""Keys against those of megatron-core's own models, in each of its layouts."""

import pytest
import torch.distributed as dist
from gpt_models import gpt_model
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from tiny_models import saved_config

from conversion.families import geometry_from_config, rules_for
from conversion.torch_dist_keys import extra_state_key, parts_under, sharded_keys, sharded_state_dict_metadata

BUILDABLE = ["llama-tied-biased", "qwen2-tied", "qwen3", "qwen3-moe", "glm4-moe", "deepseek-v3"]
LAYOUTS = {
    "ours": sharded_state_dict_metadata(),
    "stacked experts": {"non_homogeneous_layers": True},
    "stacked layers and experts": {},
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def sharded(name: str, metadata: dict) -> tuple[dict[str, ShardedTensor], set[str]]:
    geometry = geometry_from_config(saved_config(name))
    state = gpt_model(geometry, geometry.mtp_num_layers).sharded_state_dict(metadata=dict(metadata))
    apply_factories(state)
    values = list(nested_values(state))
    tensors = {value.key: value for value in values if isinstance(value, ShardedTensor)}
    return tensors, {value.unique_key for value in values if isinstance(value, ShardedObject)}


@pytest.mark.parametrize("name", BUILDABLE)
def test_keys_and_shapes_are_those_of_gpt_model(name):
    geometry = geometry_from_config(saved_config(name))
    expected, extra = {}, set()
    for rule in rules_for(geometry, geometry.mtp_num_layers):
        keys = sharded_keys(rule.megatron, geometry)
        rows, *rest = rule.shape
        expected |= dict.fromkeys(keys, (rows // len(keys), *rest))
        if key := extra_state_key(rule.megatron):
            extra.add(key)
    tensors, objects = sharded(name, sharded_state_dict_metadata())
    assert expected == {key: tensor.global_shape for key, tensor in tensors.items()}
    assert extra == objects


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BUILDABLE)
def test_every_layout_of_megatron_core_is_understood(name, layout):
    geometry = geometry_from_config(saved_config(name))
    found: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    tensors, _ = sharded(name, LAYOUTS[layout])
    for key, tensor in tensors.items():
        for part in parts_under(key, tensor.global_shape):
            shape = tensor.global_shape[len(part.leading) :]
            found.setdefault(part.name, []).append((part.order, shape))
    for rule in rules_for(geometry, geometry.mtp_num_layers):
        parts = sorted(found.pop(rule.megatron))
        assert [order for order, _ in parts] == list(range(len(parts)))
        assert (sum(shape[0] for _, shape in parts), *parts[0][1][1:]) == rule.shape
    assert not found
