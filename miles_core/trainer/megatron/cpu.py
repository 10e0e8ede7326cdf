"""What megatron-core 0.16 needs where there is no GPU, or no Transformer Engine. Installed once, before other imports.

megatron-core takes a CUDA device for granted. Each item below says what breaks without it; those for the CPU may go
when megatron-core takes its device from a configuration. On a machine with a GPU and Transformer Engine nothing here
runs.
"""

import contextlib
import functools
import importlib
import importlib.util
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from miles_core.device import device_type

_CUDA = "cuda"
_CPU = torch.device("cpu")


@functools.cache
def install() -> None:
    """Makes megatron-core usable on this machine; no effect the second time."""
    with warnings.catch_warnings():
        # Module after module says that Transformer Engine and Apex are not there.
        warnings.simplefilter("ignore", UserWarning)
        if device_type() == "cpu":
            _import_without_compiler()
            _replace_cuda_functions()
            _replace_factories()
            _replace_rng_tracker()
        if importlib.util.find_spec("transformer_engine") is None:
            _do_without_transformer_engine()


def _import_without_compiler() -> None:
    # `jit_fuser` is torch.compile: decorating a function imports the compiler, for seconds, and calling it starts a
    # C++ compiler, for more of them. Neither gains anything at the sizes that one trains on a CPU.
    compile_ = torch.compile
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    try:
        import megatron.core.jit
    finally:
        torch.compile = compile_
    megatron.core.jit.disable_jit_fuser()  # for modules that are imported later


def _replace_cuda_functions() -> None:
    # Buffers, receive buffers and router weights are created on, or moved to, `torch.cuda.current_device()`.
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    # Point-to-point communication ends with a device synchronization.
    torch.cuda.synchronize = lambda device=None: None
    # Profiler ranges around every layer raise where the CUDA runtime is absent.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None  # type: ignore[assignment]


class _TorchOnCpu(types.ModuleType):
    """The torch module, but its factories take `device="cuda"` to mean the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("empty", "ones", "tensor", "zeros"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device=_CPU if device == _CUDA else device, **kwargs)

    return create


def _replace_factories() -> None:
    # These modules create small tensors with device="cuda". A TorchFunctionMode would do as well, but costs
    # microseconds at every operation of the forward and backward pass inside the schedules.
    for name in ("optimizer.clip_grads", "optimizer.optimizer", "pipeline_parallel.schedules", "utils"):
        module = importlib.import_module(f"megatron.core.{name}")
        module.torch = _TorchOnCpu()  # type: ignore[attr-defined]


def _replace_rng_tracker() -> None:
    # Sequence parallel blocks fork the CUDA generator's state around dropout, and recomputation puts it back to where
    # it was. Dropout is 0 here.
    import megatron.core.tensor_parallel.random as random

    class NullTracker:
        def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    random._CUDA_RNG_STATE_TRACKER = NullTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda *states: None


def _do_without_transformer_engine() -> None:
    # Bugs of 0.16.1, to be dropped when a later version has none of them. The router refers to a name that is only
    # defined where Transformer Engine is installed.
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Latent attention takes a stand-in of its linear layer for the real class, and fails in isinstance().
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention

    multi_latent_attention.HAVE_TE = False
    _let_torch_adam_be_distributed()
    # For their warnings alone.
    importlib.import_module("megatron.core.models.backends")
    importlib.import_module("megatron.core.optimizer")


def _let_torch_adam_be_distributed() -> None:
    # The distributed optimizer's checkpoints were made for fused Adams, which count steps by group; torch's counts them
    # by parameter. Loading looks for a step among a parameter's tensors, and saving for one on every rank, also where a
    # pipeline stage has no experts.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_tensors, state_dict = DistributedOptimizer._set_main_param_and_optimizer_states, DistributedOptimizer.state_dict

    def set_all_but_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_tensors(self, model_param, {**tensors, "step": state["step"]})

    def state_dict_even_if_empty(self: Any) -> dict[str, Any]:
        if self.optimizer.state:
            return state_dict(self)
        groups = self.optimizer.state_dict()["param_groups"]
        return {"optimizer": {"param_groups": [{**{k: g[k] for k in g if k != "params"}, "step": 0} for g in groups]}}

    DistributedOptimizer._set_main_param_and_optimizer_states = set_all_but_step
    DistributedOptimizer.state_dict = state_dict_even_if_empty


class _CudaTypeNames(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within it `tensor.type()` names CUDA types: the bf16 optimizer accepts no other parameters when it is built."""
    if device_type() != "cpu":
        yield
        return
    with _CudaTypeNames():
        yield
