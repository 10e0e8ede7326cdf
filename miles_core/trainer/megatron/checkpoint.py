"""torch_dist checkpoints of a training run, loadable at any parallel layout.

folder/               model, optimizer, number of steps, RNG state
folder/reference/     the reference model, only where the run refreshes it
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from conversion.torch_dist_keys import sharded_state_dict_metadata
from miles_core.trainer.megatron.model import PolicyModel
from miles_core.trainer.megatron.optimizer import ModelOptimizer
from miles_core.trainer.megatron.reference import ReferenceWeights

_REFERENCE = "reference"


def load_weights(model: PolicyModel, folder: Path) -> None:
    """Reads every tensor of the model. A missing one, or one of another shape, is an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # rows that pad the vocabulary are in no checkpoint, and memory may hold NaN
    state = {"model": _model_state(model)}
    model.load_state_dict(dist_checkpointing.load(state, str(folder))["model"])


def save(folder: Path, model: PolicyModel, optimizer: ModelOptimizer, reference: ReferenceWeights | None) -> None:
    """Collective. Returns when everything is on disk."""
    model_state = _model_state(model)
    state = {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state),
        "steps": optimizer.steps,
        # Training draws no random numbers (dropout is 0) and all ranks are seeded alike: one state stands for all.
        "rng_state": torch.get_rng_state(),
    }
    _write(state, folder)
    if reference is not None:
        with reference.in_place_of_policy():
            _write({"model": _model_state(model)}, folder / _REFERENCE)


def load(folder: Path, model: PolicyModel, optimizer: ModelOptimizer, reference: ReferenceWeights | None) -> None:
    """Reads what `save` wrote, at whatever layout. Collective."""
    if reference is not None and (folder / _REFERENCE).is_dir():
        load_weights(model, folder / _REFERENCE)
        reference.refresh()
    model_state = _model_state(model)
    state = dist_checkpointing.load(
        {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state, is_loading=True)},
        str(folder),
    )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"], state["steps"])
    torch.set_rng_state(state["rng_state"])


def _model_state(model: PolicyModel) -> dict[str, Any]:
    return model.sharded_state_dict(metadata=sharded_state_dict_metadata())


def _write(state: dict[str, Any], folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), _InProcessSave(), content_metadata=sharded_state_dict_metadata())


class _InProcessSave(SaveShardedStrategy):
    """Writes this rank's part itself, one file, synced.

    megatron-core's strategy starts a manager and two writers as processes, which import the caller's main module and
    cost seconds; and forking a process that runs gloo's threads is asking for a deadlock.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True
