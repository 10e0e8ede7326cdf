"""Where tensors live and how ranks talk. The only module of the project that names a kind of device.

Everything else asks here, so that the same code runs on GPUs over NCCL and on CPU processes over gloo.
"""

from typing import Literal

import torch

DeviceType = Literal["cuda", "cpu"]


def device_type() -> DeviceType:
    """The accelerator of this machine, or the CPU where there is none (hide the GPUs to force it)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    """The device of this process: the GPU chosen by `use_local_device`, or the CPU."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def use_local_device(rank: int) -> torch.device:
    """Binds this process to one GPU of its machine, round robin by rank. No effect on CPUs."""
    if device_type() == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return current_device()


def collective_backend() -> str:
    """Backend for `torch.distributed.init_process_group`; CPU tensors go over gloo in either case."""
    return "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"


def broadcast_backend() -> str:
    """Backend of a group whose tensors are all on `current_device()`."""
    return "nccl" if device_type() == "cuda" else "gloo"


def empty_cache() -> None:
    """Gives memory that torch keeps for later back to the device, for other processes."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def peak_memory() -> int:
    """Most bytes that torch has taken of this process's device since the last call; 0 on CPUs."""
    if device_type() == "cpu":
        return 0
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peak


def synchronize() -> None:
    """Waits until the device has done all work queued so far (before a clock is read)."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def compute_capability() -> tuple[int, int] | None:
    """Of this process's GPU, (9, 0) for Hopper; None without one."""
    return None if device_type() == "cpu" else torch.cuda.get_device_capability()


def device_names() -> list[str]:
    """Names of the accelerators of this machine, empty where there is none."""
    if device_type() == "cpu":
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
