"""RMSNorm as Megatron modules."""

from typing import Any

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
        return self.normed(x, self.weight)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """x, normed with a weight."""
        weight = weight.float()
        if self.plus_one:  # Gemma stores weight - 1
            weight = 1 + weight
        return _RmsNorm.apply(x.float(), weight, self.eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps), z = r x and g = dy * weight:

        y = z * weight,  dweight = sum over rows of dy * z,  dx = r (g - z mean(g * z))

    Written out because autograd's version passes over memory twice as often, which is all that a norm costs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        products = grad * normed
        mean = (products @ weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x, products.flatten(0, -2).sum(0), None


def over_all_heads(norm: type[RmsNorm], heads: int) -> type[RmsNorm]:
    """`norm` over the heads together instead of one for each (MiniMax-M2). x is [..., heads, head_dim]."""

    class AllHeadsNorm(norm):  # type: ignore[misc, valid-type]
        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__(config, heads * hidden_size, eps)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(-2)).view_as(x)

    return AllHeadsNorm
