"""A model that holds weights as SGLang's do: query, key and value in one matrix, gate and up in one, experts in blocks,
a padded vocabulary, each rank of tensor parallelism a slice. Its loader is written as theirs are: a loop over names
that narrows and copies."""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

PADDED_VOCAB = 8  # rows more than the checkpoint has
_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj")
_STACKED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
            "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip
_BY_COLUMN = ("o_proj", "down_proj")


class FusedModel(nn.Module):
    """Parameters for the checkpoint tensors of `shapes`.

    Args:
        mtp_from: layers from here on are left out, as a server does that has no draft; None keeps all.
        threads: load in threads, as SGLang's DeepSeek does.
        derives: compute a further tensor from a weight, as multi-head latent attention does.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], *, rank: int = 0, ranks: int = 1, mtp_from: int | None = None,
        threads: bool = False, derives: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._rank, self._ranks, self._threads, self._derives = rank, ranks, threads, derives
        self.skips: set[str] = set()  # a fault: tensors that the loader drops without a word
        self.loads = 0  # calls of load_weights
        self._places: dict[str, tuple[str, int | None, int, int, int, bool]] = {}
        sizes: dict[str, list[int]] = {}
        experts: dict[str, int] = {}
        for name, shape in shapes.items():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if mtp_from is not None and layer and int(layer[1]) >= mtp_from:
                continue
            self._plan(name, shape, sizes, experts)
        for name, size in sizes.items():
            block = [experts[name]] if name in experts else []
            parameter = nn.Parameter(torch.full([*block, *size], 7.0), requires_grad=False)
            self.register_parameter(name.replace(".", "/"), parameter)

    def _plan(self, name: str, shape: tuple[int, ...], sizes: dict[str, list[int]], experts: dict[str, int]) -> None:
        target, expert, axis = name, None, 0
        if found := _EXPERT.search(name):
            expert = int(found[1])
            target = name.replace(f"experts.{expert}.", "experts.")
            experts[target_of(target)] = max(experts.get(target_of(target), 0), expert + 1)
        target = target_of(target)
        split = len(shape) == 2 and name.endswith("_proj.weight") and "eh_proj" not in name
        if split and any(part in name for part in _BY_COLUMN):
            axis = 1
        part = list(shape)
        if split:
            part[axis] //= self._ranks
        if "embed_tokens" in name or "lm_head" in name:
            part[0] += PADDED_VOCAB
        if target in sizes and target != name and expert in (None, 0):
            start = sizes[target][0]
            sizes[target][0] += part[0]
        elif target in sizes:
            start = self._places[re.sub(r"experts\.\d+\.", "experts.0.", name)][2]
        else:
            start, sizes[target] = 0, part
        self._places[name] = (
            target,
            expert,
            start,
            axis,
            part[axis] if split else -1,
            "embed" in name or "lm_head" in name,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        parameters = dict(self.named_parameters())
        if self._threads:
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(self._load, name, tensor, parameters) for name, tensor in weights]:
                    done.result()
        else:
            for name, tensor in weights:
                self._load(name, tensor, parameters)
        if self._derives:
            self.derived = parameters["lm_head/weight"].T.contiguous() * 2

    def _load(self, name: str, loaded: Tensor, parameters: dict[str, nn.Parameter]) -> None:
        if name not in self._places or name in self.skips:
            return
        target, expert, start, axis, size, vocabulary = self._places[name]
        data = parameters[target.replace(".", "/")].data
        if expert is not None:
            data = data[expert]
        if size >= 0:
            loaded = loaded.narrow(axis, self._rank * size, size)
        if vocabulary:
            data[: loaded.shape[0]].copy_(loaded)
            data[loaded.shape[0] :].fill_(0)
        else:
            data.narrow(0, start, loaded.shape[0]).copy_(loaded)


def target_of(name: str) -> str:
    """The fused parameter of a checkpoint's tensor."""
    for part, (fused, _) in _STACKED.items():
        name = name.replace(f".{part}.", f".{fused}.")
    return name
