"""Runs inside SGLang's scheduler processes, as their `--custom-weight-loader`: puts pushed tensors into the model, and
reads back what the model holds.

A model's own `load_weights` knows where each tensor of a checkpoint belongs (query, key and value in one matrix,
experts in one block, a slice of it under tensor parallelism). It is a Python loop over names, which takes longer than
moving the bytes. So the first push of each bucket runs it and records the copies that it makes; later pushes repeat
these copies in a few fused kernels. A model whose loading does more than copy (it derives further
tensors from its weights, as multi-head latent attention does) is loaded by its own loop every time.

The same record shows where each tensor has gone, so the model can be asked what it holds now: the copies run the other
way, back into the buffer, and whoever pushed compares digests.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_core.device import synchronize
from miles_core.weight_sync.layout import Layout
from miles_core.weight_sync.packing import copy_all

LOADER = f"{__name__}.exchange"
LOAD, READ, REFRESH = "load", "read", "refresh"
_WIDENED = "_fp32"  # ends the name of a copy that a module makes of a parameter when it first runs
_BUFFERS = 2  # the pusher fills one while the other is read


def header(action: str, layout: Layout, *, first: bool, last: bool) -> str:
    """What goes with a buffer; `action` is "load", "read" or "refresh" (which takes none of the buffer). `first` and
    `last` of a push: formats whose kernels want another layout are unpacked and packed again around it, and what is
    derived from weights is renewed after it."""
    return f"{action} {layout.key} {int(first)} {int(last)}\n{layout.text}"


def exchange(model: nn.Module, named_tensors: Sequence[tuple[str, nn.Module]]) -> None:
    """SGLang's entry: one pair of a header and a `carrier` of a flat uint8 buffer, shared with the pusher. Returns when
    the device is done, since the pusher then uses the buffer again."""
    ((text, carried),) = named_tensors
    flat: Tensor = carried.flat  # type: ignore[assignment]
    line, _, layout = text.partition("\n")
    action, key, first, last = line.split()
    plans = _PLANS.setdefault(model, {})
    with torch.no_grad():
        if first == "1":
            _for_packed_layers(model, "restore_weights_before_loading")
        if action == LOAD:
            _load(model, plans, key, layout, flat)
        elif action == READ:
            _read(model, plans, key, layout, flat)
        if last == "1":
            _for_packed_layers(model, "process_weights_after_loading")
            _refresh_copies(model)
    synchronize()


def _for_packed_layers(model: nn.Module, call: str) -> None:
    """Calls a method of the layers' formats that can undo what they do to weights after loading (INT4 by Marlin)."""
    for module in model.modules():
        for scheme in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
            if hasattr(scheme, "restore_weights_before_loading"):
                getattr(scheme, call)(module)
                break


def _refresh_copies(model: nn.Module) -> None:
    """Brings what modules derived from their weights up to date, in place: CUDA graphs hold its address.

    The routers of SGLang's GLM-4.5 keep `_weight_fp32`, and would choose experts by the first weights for ever.
    """
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        for name, copy in module.named_buffers(recurse=False):
            if name.startswith("_") and name.endswith(_WIDENED):
                copy.copy_(parameters[name[1 : -len(_WIDENED)]])


@dataclass
class _Copy:
    """One copy that loading makes: from a part of the buffer into a part of a parameter."""

    target: Tensor
    dtype: torch.dtype  # of the source
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of the source, bytes from the start of the buffer

    def source(self, flat: Tensor) -> Tensor:
        return flat.view(self.dtype).as_strided(
            self.size, self.stride, flat.storage_offset() // self.dtype.itemsize + self.offset // self.dtype.itemsize
        )


@dataclass
class _Plan:
    """What loading one bucket does."""

    copies: list[_Copy]
    only_copies: bool  # so that repeating them is loading
    memory: tuple[int, ...]  # where the model's parameters were
    bound: dict[int, list[Tensor]] = field(default_factory=dict)  # sources, by the buffer's address

    def sources(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`. Kept for the buffers that come again, which also keeps them mapped in this process."""
        address = flat.data_ptr()
        if address not in self.bound:
            while len(self.bound) >= _BUFFERS:
                del self.bound[next(iter(self.bound))]
            self.bound[address] = [copy.source(flat) for copy in self.copies]
        return self.bound[address]


_PLANS: WeakKeyDictionary[nn.Module, dict[str, _Plan]] = WeakKeyDictionary()  # by the layout's key


def _load(model: nn.Module, plans: dict[str, _Plan], key: str, layout: str, flat: Tensor) -> None:
    plan = _valid(model, plans.get(key))
    if plan is not None and plan.only_copies:
        copy_all([copy.target for copy in plan.copies], plan.sources(flat))
    else:
        plans[key] = _record(model, layout, flat, execute=True)


def _read(model: nn.Module, plans: dict[str, _Plan], key: str, layout: str, flat: Tensor) -> None:
    """Writes what the model holds over the buffer; parts that it does not hold stay as they are."""
    plan = _valid(model, plans.get(key))
    if plan is None:  # the bucket came another way
        plan = plans[key] = _record(model, layout, flat, execute=False)
    copy_all(plan.sources(flat), [copy.target for copy in plan.copies])


def _record(model: nn.Module, layout: str, flat: Tensor, *, execute: bool) -> _Plan:
    described = Layout.from_text(layout)
    named = zip((spec.name for spec in described.specs), described.views(flat), strict=True)
    recorder = _Recorder(flat, execute=execute)
    with suppress(_MoreThanCopiesError), _threads_in_order(), recorder:
        model.load_weights(named)  # type: ignore[operator]  # every SGLang model has it
    return _Plan(recorder.copies, recorder.only_copies and execute, _memory(model))


def _valid(model: nn.Module, plan: _Plan | None) -> _Plan | None:
    return plan if plan is not None and plan.memory == _memory(model) else None


def _memory(model: nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


class _MoreThanCopiesError(Exception):
    """Loading that is only looked at would compute something."""


class _Recorder(TorchDispatchMode):
    """Notes the copies out of a buffer, and whether anything else happens. Without `execute` no copy is made."""

    def __init__(self, flat: Tensor, *, execute: bool) -> None:
        super().__init__()
        self._buffer, self._start, self._execute = _memory_of(flat), flat.data_ptr(), execute
        self.copies: list[_Copy] = []
        self.only_copies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default and args[0].shape == args[1].shape and _memory_of(args[1]) == self._buffer:
            target, source = args[:2]
            where = source.data_ptr() - self._start
            self.copies.append(_Copy(target, source.dtype, tuple(source.shape), source.stride(), where))
            return func(*args, **(kwargs or {})) if self._execute else target
        if func in (aten.fill_.Scalar, aten.zero_.default):  # the rest of a padded vocabulary
            return func(*args, **(kwargs or {}))
        if func is aten._local_scalar_dense.default or func._schema.is_mutable:
            self._more()
        result = func(*args, **(kwargs or {}))
        known = {_memory_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        if any(isinstance(value, Tensor) and _memory_of(value) not in known for value in tree_leaves(result)):
            self._more()  # a new tensor: computed from weights, or a copy of them
        return result

    def _more(self) -> None:
        self.only_copies = False
        if not self._execute:
            raise _MoreThanCopiesError


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _threads_in_order() -> Iterator[None]:
    """Some models load in threads, which a dispatch mode does not see: here their work runs at once, in this thread."""
    threaded = ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = threaded  # type: ignore[method-assign]
