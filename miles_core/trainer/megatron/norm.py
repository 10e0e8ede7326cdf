"""RMSNorm as Megatron modules."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, in fp32, returned in x's dtype (Zhang and Sennrich, arXiv 1910.07467).

    Works on any device, and with sequence parallelism, which megatron-core's own wrapper of torch refuses: the weight
    is marked, so that its gradients are summed over the tensor-parallel ranks.

    Shapes: x [..., hidden_size] -> [..., hidden_size].
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.plus_one = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        if self.plus_one:  # Gemma stores weight - 1
            weight = 1 + weight
        x32 = x.float()
        y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (y * weight).to(x.dtype)


class _AllHeadsNorm(RmsNorm):
    """One norm over the heads together instead of one for each (MiniMax-M2). x is [..., heads, head_dim]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class AllQueryHeadsNorm(_AllHeadsNorm):
    """`_AllHeadsNorm` of the queries."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, config.num_attention_heads * hidden_size, eps)


class AllKeyHeadsNorm(_AllHeadsNorm):
    """`_AllHeadsNorm` of the keys."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, config.num_query_groups * hidden_size, eps)
