"""Mixture of experts: router, routed experts, shared expert."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from conversion.families.family import HfNames
from conversion.geometry import ModelGeometry, MoeGeometry
from miles_core.rollout.embedded.blocks import Allocate, Mlp, NamedTensors, gated

# Multiply-adds for experts not chosen that take less time than sorting tokens by expert, and the number of tokens
# below which reading the weights counts instead (docs/performance-engine.md).
_CHEAP_WASTE = 8_000_000
_READING_TOKENS = 16


class Router:
    """Scores in float32, whatever the model's dtype: a rounded score changes which experts are taken."""

    def __init__(self, moe: MoeGeometry, hidden_size: int, allocate: Allocate) -> None:
        if moe.score == "softmax" and (moe.num_groups > 1 or moe.router_bias):
            raise ValueError("MoeGeometry: groups and a correction bias need sigmoid scores, found softmax")
        self.moe = moe
        self.weight = allocate(moe.num_experts, hidden_size, dtype=torch.float32)
        self.bias = allocate(moe.num_experts, dtype=torch.float32) if moe.router_bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> weights float32 [tokens, top_k] and experts int64 [tokens, top_k], best first."""
        return self.choose(F.linear(x.float(), self.weight), torch.sigmoid)

    def choose(
        self, logits: torch.Tensor, sigmoid: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from float32 logits [tokens, experts]."""
        if self.moe.score == "softmax":
            weights, experts = logits.topk(self.moe.top_k, dim=-1)
            # divided by their sum, the softmax over all is the softmax over the chosen
            weights = weights.softmax(dim=-1) if self.moe.norm_topk else logits.softmax(dim=-1).gather(1, experts)
        else:
            scores = sigmoid(logits)
            choice = scores if self.bias is None else scores + self.bias
            if self.moe.num_groups > 1:
                choice = self._best_groups_only(choice)
            experts = choice.topk(self.moe.top_k, dim=-1).indices
            weights = scores.gather(1, experts)
            if self.moe.norm_topk:
                weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights if self.moe.routed_scaling == 1 else weights * self.moe.routed_scaling), experts

    def _best_groups_only(self, choice: torch.Tensor) -> torch.Tensor:
        """A group counts by its two best experts (https://arxiv.org/abs/2412.19437, section 2.1.2)."""
        grouped = choice.unflatten(-1, (self.moe.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.moe.topk_groups, dim=-1).indices
        excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, False)
        return grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(1)


class MixtureOfExperts:
    """The experts' matrices are stacked: gate_up [experts, 2 * width, hidden] and down [experts, width, hidden]."""

    def __init__(self, g: ModelGeometry, moe: MoeGeometry, allocate: Allocate) -> None:
        if moe.shared_gate:
            raise ValueError(f"{g.architecture}: the embedded engine has no gate on shared experts")
        self.moe, self.activation = moe, g.activation
        self.router = Router(moe, g.hidden_size, allocate)
        self.gate_up = allocate(moe.num_experts, 2 * moe.ffn_hidden_size, g.hidden_size)
        self.down = allocate(moe.num_experts, moe.ffn_hidden_size, g.hidden_size)
        self.shared = Mlp(g, moe.shared_ffn_hidden_size, allocate) if moe.shared_ffn_hidden_size else None
        waste_per_token = (moe.num_experts - moe.top_k) * 3 * moe.ffn_hidden_size * g.hidden_size
        few_tokens = _CHEAP_WASTE // max(waste_per_token, 1)
        self._few_tokens = few_tokens if few_tokens >= _READING_TOKENS else 0

    def tensors(self, prefix: str, names: HfNames) -> NamedTensors:
        yield f"{prefix}.gate.weight", self.router.weight
        if self.router.bias is not None:
            yield f"{prefix}.{names.router_bias}", self.router.bias
        for e in range(self.moe.num_experts):
            gate, up = self.gate_up[e].chunk(2)
            yield f"{prefix}.experts.{e}.{names.gate}.weight", gate
            yield f"{prefix}.experts.{e}.{names.up}.weight", up
            yield f"{prefix}.experts.{e}.{names.down}.weight", self.down[e].T
        if self.shared is not None:
            yield from self.shared.tensors(f"{prefix}.shared_experts")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> [tokens, hidden] and the experts taken, int64 [tokens, top_k]."""
        weights, experts = self.router.forward(x)
        routed = self._every_expert if len(x) <= self._few_tokens else self._chosen_experts
        out = routed(x, weights.to(x.dtype), experts)
        return out if self.shared is None else out.add_(self.shared.forward(x)), experts

    def _every_expert(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """All experts as one wide MLP, with weight 0 where not chosen."""
        dense = weights.new_zeros(len(x), self.moe.num_experts).scatter_(1, experts, weights)
        gate_up = F.linear(x, self.gate_up.flatten(0, 1)).unflatten(-1, (self.moe.num_experts, -1))
        hidden = gated(gate_up, self.activation).mul_(dense.unsqueeze(-1))
        return hidden.flatten(1) @ self.down.flatten(0, 1)

    def _chosen_experts(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert, one product an expert."""
        order = experts.flatten().argsort()
        ends = torch.bincount(experts.flatten(), minlength=self.moe.num_experts).cumsum(0).int()
        tokens = x.index_select(0, order // self.moe.top_k)
        gate_up = F.grouped_mm(tokens, self.gate_up.transpose(1, 2), offs=ends)
        hidden = F.grouped_mm(gated(gate_up, self.activation), self.down, offs=ends)
        out = torch.empty_like(hidden).index_copy_(0, order, hidden)
        return torch.bmm(weights.unsqueeze(1), out.unflatten(0, (len(x), -1))).squeeze(1)
