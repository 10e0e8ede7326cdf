"""Checkpoints across the border: ours loaded by megatron-core at several layouts, megatron-core's read by us."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from gpt_models import gpt_model, local_part, named_tensors
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from tiny_checkpoints import megatron_tensors, same_bits, write_checkpoint

from conversion.families import geometry_from_config
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.safetensors_header import read_json
from conversion.torch_dist_keys import sharded_state_dict_metadata
from conversion.torch_dist_reader import TorchDistFolder

SAVED_AS: dict[str, tuple[str, dict]] = {  # prefix of all keys, metadata of sharded_state_dict
    "singleton": ("", sharded_state_dict_metadata()),
    "stacked": ("", {}),
    "prefixed": ("policy.", {}),
}
MODELS = {  # model of tiny_models, changes of its config
    "moe": ("glm4-moe", {}),
    "moe of 4 layers": ("glm4-moe", {"num_hidden_layers": 4}),
    "dense": ("llama-tied-biased", {}),
    "latent attention": ("deepseek-v3", {}),
}
# The local spec's norms lack the sequence parallelism that a MoE wants with tensor parallelism: the dense model has it.
TWO_RANKS = [("moe", {"expert": 2}), ("moe of 4 layers", {"pipeline": 2}), ("dense", {"tensor": 2})]
ONE_RANK = ["dense", "latent attention"]


def load_and_save(folder: Path, hf: Path, out: Path) -> None:
    """On each rank: load our checkpoint into a GPTModel, compare its part, save it as training runs do."""
    geometry = geometry_from_config(read_json(hf / "config.json"))
    _, expected = megatron_tensors(hf)
    model = gpt_model(geometry, geometry.mtp_num_layers)
    state = model.sharded_state_dict(metadata=sharded_state_dict_metadata())
    loaded = dist_checkpointing.load({"model": state}, str(folder / "release"), strict="raise_all")
    model.load_state_dict(loaded["model"])
    wrong = [
        name
        for name, tensor in named_tensors(model).items()
        if not torch.equal(tensor, local_part(name, expected[name], tensor).to(tensor.dtype))
    ]
    assert not wrong, wrong
    for layout, (prefix, metadata) in SAVED_AS.items():
        state = model.sharded_state_dict(prefix, metadata=dict(metadata))
        # What a training run saves beside the model, among it a tensor whose key ends like one of the model's.
        moment = torch.full((8, 4), float(dist.get_rank()))
        key = f"optimizer.state.exp_avg.{prefix}embedding.word_embeddings.weight"
        state[key] = ShardedTensor.from_rank_offsets(key, moment, (0, dist.get_rank(), dist.get_world_size()))
        state["iteration"] = 7
        folder = out / layout
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(folder))


def run_rank(rank: int, world_size: int, store: Path, jobs: list[tuple[Path, Path, dict[str, int]]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for root, out, sizes in jobs:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.get("tensor", 1),
            pipeline_model_parallel_size=sizes.get("pipeline", 1),
            expert_model_parallel_size=sizes.get("expert", 1),
        )
        load_and_save(root / "torch_dist", root / "hf", out)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of each model: `hf`, and `torch_dist` that we made of it."""
    roots = {}
    for name, (model, changes) in MODELS.items():
        roots[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        write_checkpoint(roots[name] / "hf", model, **changes)
        hf_to_torch_dist(roots[name] / "hf", roots[name] / "torch_dist")
    return roots


def assert_read_back(folder: Path, hf: Path) -> None:
    """What was saved from fp32 parameters is the source, widened; the vocabulary may be padded with zeros."""
    _, expected = megatron_tensors(hf)
    saved = TorchDistFolder(folder)
    assert set(saved.names) == set(expected)
    for name, tensor in expected.items():
        read = saved.read(name)
        assert saved.spec(name).shape == tuple(read.shape), name
        assert saved.spec(name).dtype == str(read.dtype).removeprefix("torch.") == "float32", name
        assert same_bits(read[: len(tensor)], tensor.float()), name
        assert not read[len(tensor) :].any()


def test_one_rank(models: dict[str, Path], tmp_path: Path) -> None:
    run_rank(0, 1, tmp_path / "store", [(models[name], tmp_path / name, {}) for name in ONE_RANK])
    for name in ONE_RANK:
        for layout in SAVED_AS:
            assert_read_back(tmp_path / name / layout, models[name] / "hf")


@pytest.mark.slow
def test_two_ranks_of_every_kind_of_parallelism(models: dict[str, Path], tmp_path: Path) -> None:
    jobs = [(models[name], tmp_path / name, sizes) for name, sizes in TWO_RANKS]
    torch.multiprocessing.spawn(run_rank, (2, tmp_path / "store", jobs), nprocs=2)
    for name, _ in TWO_RANKS:
        for layout in SAVED_AS:
            assert_read_back(tmp_path / name / layout, models[name] / "hf")
