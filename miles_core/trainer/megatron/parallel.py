"""Process groups of the trainer, and the place of this rank among them."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from miles_core.config.trainer import TrainerConfig
from miles_core.device import collective_backend, device_type, use_local_device

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank."""

    data_rank: int
    data_size: int
    tensor_rank: int
    context_rank: int
    is_last_stage: bool

    @property
    def speaks_for_its_data(self) -> bool:
        """True on exactly one rank of each model replica: the one whose log-probs and metrics count."""
        return self.is_last_stage and self.tensor_rank == self.context_rank == 0


def join(config: TrainerConfig, *, rank: int, world_size: int, init_method: str, seed: int) -> Place:
    """Enters the process groups.

    Raises:
        ValueError: `world_size` is not `trainer.num_ranks`.
    """
    if world_size != config.num_ranks:
        raise ValueError(f"started as {world_size} ranks, trainer.num_ranks is {config.num_ranks}: they must be equal")
    use_local_device(rank)
    dist.init_process_group(
        collective_backend(), init_method=init_method, rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        # Experts are spread whole: with tensor parallelism each rank brings its part of the sequence to them.
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    if device_type() != "cpu":
        model_parallel_cuda_manual_seed(seed)
    return Place(
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def leave() -> None:
    """Leaves the process groups, so that the process may join others."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
