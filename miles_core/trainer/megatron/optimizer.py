"""AdamW with fp32 master weights by megatron-core; learning rate, clipping and refusal of bad steps are ours."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import nn

from miles_core.config.trainer import OptimizerConfig
from miles_core.trainer.megatron.cpu import cuda_type_names


@dataclass(frozen=True)
class StepResult:
    """What became of one step."""

    grad_norm: float  # over all ranks, before clipping
    apart_grad_norm: float | None  # that of the parameters that are clipped apart
    lr: float
    applied: bool


class ModelOptimizer:
    """One optimizer step from the gradients that the backward passes left in the model's buffers.

    `apart` are parameters clipped by a norm of their own, so that they leave the steps of all others as they are
    without them; an empty list where they lie on other ranks, None where there are none at all.
    """

    def __init__(
        self, model: DistributedDataParallel, config: OptimizerConfig, apart: Iterable[nn.Parameter] | None = None
    ) -> None:
        self._config = config
        bf16 = model.config.bf16
        with cuda_type_names():
            self.megatron: ChainedOptimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=self._config.lr,
                    weight_decay=self._config.weight_decay,
                    adam_beta1=self._config.beta1,
                    adam_beta2=self._config.beta2,
                    adam_eps=self._config.eps,
                    bf16=bf16,
                    use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
                    params_dtype=torch.bfloat16 if bf16 else torch.float32,
                    clip_grad=0.0,  # megatron-core clips CUDA tensors only; `_clip` clips any
                ),
                [model],
                use_gloo_process_groups=False,
            )
        for group in self.megatron.param_groups:
            group["fused"] = True  # one call for all parameters; megatron-core has no option for it
        self._start_state()
        # The optimizer steps fp32 copies of bf16 parameters.
        clipped_apart = None if apart is None else {id(getattr(p, "main_param", p)) for p in apart}
        all_parameters = [p for group in self.megatron.param_groups for p in group["params"]]
        self._together = [p for p in all_parameters if id(p) not in (clipped_apart or ())]
        self._apart = None if clipped_apart is None else [p for p in all_parameters if id(p) in clipped_apart]
        self.steps = 0  # applied so far

    def learning_rate(self) -> float:
        """Of the next step: rises linearly over `warmup_steps`, then stays."""
        warmup = self._config.warmup_steps
        return self._config.lr * min(1.0, (self.steps + 1) / warmup) if warmup else self._config.lr

    def step(self) -> StepResult:
        """Clips and applies the gradients, or leaves the weights as they are where a gradient is not finite."""
        lr = self.learning_rate()
        self.megatron.prepare_grads()
        grad_norm, apart_norm = self._norm_without(self._apart or []), None
        applied = math.isfinite(grad_norm)
        if self._apart is not None:
            apart_norm = self._norm_without(self._together)
            applied = applied and math.isfinite(apart_norm)
        if applied:
            self._clip(self._together, grad_norm)
            if self._apart is not None and apart_norm is not None:
                self._clip(self._apart, apart_norm)
            for group in self.megatron.param_groups:
                group["lr"] = lr
            self.megatron.step_with_ready_grads()
            self.steps += 1
        self.megatron.zero_grad()  # `prepare_grads` made each `.grad` an alias of the buffer that passes add to
        return StepResult(grad_norm, apart_norm, lr, applied)

    def _norm_without(self, left_out: list[nn.Parameter]) -> float:
        """Norm over all ranks of the gradients of all other parameters. Collective."""
        grads = [p.grad for p in left_out]
        for parameter in left_out:
            parameter.grad = None
        norm = self.megatron.get_grad_norm()
        for parameter, grad in zip(left_out, grads, strict=True):
            parameter.grad = grad
        return float(norm)

    def _clip(self, parameters: list[nn.Parameter], grad_norm: float) -> None:
        """Scales the gradients, whose common norm is `grad_norm`, so that it is at most `clip_grad`."""
        limit = self._config.clip_grad
        if limit and grad_norm > limit:
            grads = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(grads, limit / (grad_norm + 1e-6))

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Takes over what a checkpoint holds."""
        self.steps = steps
        # megatron-core stores Adam's step from rank 0 alone, whose pipeline stage may have none of a group's tensors.
        parts = [state] if "state" in state or "optimizer" in state else list(state.values())
        for part in parts:
            inner = part.get("optimizer", part)
            if "state" in inner:
                inner["state"]["common_step"] = torch.tensor(float(steps))
            else:
                for group in inner["param_groups"]:
                    group["step"] = steps
        self.megatron.load_state_dict(state)
        self._set_adam_steps(steps)  # the distributed optimizer gives all parameters one and the same tensor

    def sharded_state_dict(self, model_state: dict[str, Any], *, is_loading: bool = False) -> dict[str, Any]:
        """What a checkpoint holds, a tensor for each parameter and moment, for any layout to read."""
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        return self.megatron.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)

    def _start_state(self) -> None:
        """Zero moments at once, so that a checkpoint before the first step has them, and memory is taken at start."""
        for optimizer in self.megatron.chained_optimizers:
            if not optimizer.is_stub_optimizer:
                optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        self._set_adam_steps(0)

    def _set_adam_steps(self, steps: int) -> None:
        for optimizer in self.megatron.chained_optimizers:
            for parameter_state in optimizer.optimizer.state.values():
                device = parameter_state["exp_avg"].device
                parameter_state["step"] = torch.tensor(float(steps), device=device)
