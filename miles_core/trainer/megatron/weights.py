"""Between this rank's parameters and the whole model's tensors under their Megatron or Hugging Face names.

A whole tensor may lie on one pipeline stage, on one rank of the expert-parallel group, and in parts on the
tensor-parallel ranks.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from conversion.mapping import Rule
from miles_core.config.preflight_layout import stage_layers
from miles_core.device import current_device
from miles_core.trainer.megatron.model import PolicyModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.linear_(fc[12])\.weight$")


@dataclass(frozen=True)
class _Home:
    """Where a whole tensor lies."""

    stage: int
    expert_rank: int | None  # in the expert-parallel group; None: not an expert's
    local: Tensor | None  # this rank's part, where it has one


class WholeTensors:
    """The model's tensors, whole, by unsharded Megatron name. Calls are collective: every rank makes the same."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self._dtype = model.config.params_dtype
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tensor_size = parallel_state.get_tensor_model_parallel_world_size()

    def to_hf(self, rules: Sequence[Rule], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors in the order of the rules, one at a time, on every rank.

        Args:
            rules: all rules of the model.
            dtypes: of each tensor that the Hugging Face folder holds; decides about optional copies as well.
        """
        for rule in rules:
            for name, tensor in rule.to_hf(self.gather(rule), dtypes).items():
                yield name, tensor.to(dtypes[name])

    def gather(self, rule: Rule) -> Tensor:
        """The whole tensor of a rule; may share memory with the parameter where nothing is split."""
        home = self._home(rule.megatron)
        whole = None if home.local is None else self._join(home.local.detach(), rule)
        if home.expert_rank is not None and home.stage == self._stage:
            whole = self._broadcast(whole, rule, parallel_state.get_expert_model_parallel_group(), home.expert_rank)
        return self._broadcast(whole, rule, parallel_state.get_pipeline_model_parallel_group(), home.stage)

    def scatter(self, rule: Rule, whole: Callable[[], Tensor]) -> None:
        """Writes this rank's part of a rule's tensor; `whole` is called only where there is one."""
        local = self._home(rule.megatron).local
        if local is not None:
            with torch.no_grad():
                local.copy_(self._split(whole(), local, rule))

    def _home(self, name: str) -> _Home:
        """Raises KeyError with the name where the model has no such tensor."""
        stage = 0 if name.startswith("embedding.") else self._stages - 1
        if layer := _LAYER.match(name):
            per_stage = len(stage_layers(self._model.geometry.num_layers, self._stages)[0])
            stage = int(layer[1]) // per_stage
            name = f"decoder.layers.{int(layer[1]) - stage * per_stage}.{name[layer.end() :]}"
        here = stage == self._stage
        if (expert := _EXPERT.search(name)) is None:
            return _Home(stage, None, _tensor(self._model, name) if here else None)
        number = int(expert[1])
        moe = self._model.geometry.moe
        assert moe is not None
        per_rank = moe.num_experts // parallel_state.get_expert_model_parallel_world_size()
        rank = number // per_rank
        if not here or rank != parallel_state.get_expert_model_parallel_rank():
            return _Home(stage, rank, None)
        return _Home(stage, rank, _tensor(self._model, f"{name[: expert.start()]}.{expert[2]}")[number % per_rank])

    def _join(self, local: Tensor, rule: Rule) -> Tensor:
        if (axis := self._split_axis(local, rule)) is None:
            return local
        parts = [torch.empty_like(local) for _ in range(self._tensor_size)]
        dist.all_gather(parts, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        if _is_gate_up(rule):
            gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
            return torch.cat([*gates, *ups])
        return torch.cat(parts, dim=axis).narrow(axis, 0, rule.shape[axis])  # without the vocabulary's padding

    def _split(self, whole: Tensor, local: Tensor, rule: Rule) -> Tensor:
        if (axis := self._split_axis(local, rule)) is None:
            return whole
        if _is_gate_up(rule):
            return torch.cat([half.chunk(self._tensor_size)[self._tensor_rank] for half in whole.chunk(2)])
        missing = local.shape[axis] * self._tensor_size - whole.shape[axis]
        if missing:  # the vocabulary, padded
            whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
        return whole.chunk(self._tensor_size, axis)[self._tensor_rank]

    def _broadcast(self, tensor: Tensor | None, rule: Rule, group: dist.ProcessGroup, source: int) -> Tensor:
        """The tensor of rank `source` of the group."""
        if group.size() == 1:
            assert tensor is not None, rule.megatron
            return tensor
        if tensor is None:
            is_bias = rule.megatron.endswith("expert_bias")  # stays fp32 whatever the precision
            tensor = torch.empty(rule.shape, dtype=torch.float32 if is_bias else self._dtype, device=current_device())
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
        return tensor

    def _split_axis(self, local: Tensor, rule: Rule) -> int | None:
        differing = [i for i, (a, b) in enumerate(zip(local.shape, rule.shape, strict=True)) if a != b]
        return differing[0] if differing else None


def _tensor(model: PolicyModel, name: str) -> Tensor:
    tensor: Tensor = model
    for part in name.split("."):
        tensor = getattr(tensor, part)
    return tensor


def _is_gate_up(rule: Rule) -> bool:
    return rule.megatron.endswith(("linear_fc1.weight", "linear_fc1.bias"))
