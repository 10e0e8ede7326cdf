"""Gradients for values that come from elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            value = ctx.plain(*inputs)
        grads = iter(torch.autograd.grad(value, [x for x in inputs if x.requires_grad], grad))
        return None, None, *(next(grads) if w else None for w in wanted)


def with_gradient_of(plain: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """exact(*inputs), whose gradient is that of plain(*inputs): two ways to compute one function.

    Only the inputs are kept for the backward pass, which runs `plain` again.
    """
    return _WithGradientOf.apply(exact, plain, *inputs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return exact(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return None, (grad @ weight).to(x.dtype), grad.flatten(0, -2).T @ x.flatten(0, -2).to(weight.dtype)


def linear_with_gradient(exact: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """exact(x, weight), x [..., K] times weight [N, K] transposed, with the gradient of that product."""
    return _Linear.apply(exact, x, weight)


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def valued(plain: Tensor, value: Tensor) -> Tensor:
    """`value`, through which gradients go on to `plain`: two results of one function, already computed."""
    return _Valued.apply(plain, value)
