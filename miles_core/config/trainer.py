"""The trainer: precision, batches, optimizer, parallel layout, checkpoints."""

from typing import Literal

from pydantic import Field, model_validator

from miles_core.config.base import Section


class OptimizerConfig(Section):
    """AdamW with fp32 master weights."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from lr / warmup_steps."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""


class ParallelConfig(Section):
    """Sizes of the parallel groups; what remains of `trainer.num_ranks` is data parallel."""

    tensor: int = Field(1, ge=1)
    """Tensor parallel size."""
    pipeline: int = Field(1, ge=1)
    """Pipeline parallel size."""
    context: int = Field(1, ge=1)
    """Context parallel size: ranks that share the tokens of each sequence."""
    expert: int = Field(1, ge=1)
    """Expert parallel size: over how many ranks of a pipeline stage the routed experts are spread."""


class CheckpointConfig(Section):
    """Checkpoints from which an interrupted run goes on."""

    interval: int = Field(10, ge=1)
    """Save after each so many rollouts; the last one is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep; older ones are removed after a newer one is complete."""


class TrainerConfig(Section):
    """megatron-core, over NCCL on GPUs and gloo on CPUs. One optimizer step takes `global_batch_size` samples in
    micro-batches of `micro_batch_size`."""

    precision: Literal["fp32", "bf16"] = "bf16"
    """Of weights and activations; master weights and log-probs are fp32."""
    num_ranks: int = Field(1, ge=1)
    """Trainer processes: GPUs, or CPU processes where there is no GPU."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples of one optimizer step; null takes the whole rollout in one step."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples of one forward and backward pass on one rank."""
    packing: bool = True
    """Lay the sequences of a micro-batch end to end instead of padding them; the result is the same."""
    routing_replay: bool = True
    """R3: a MoE takes the experts in training that the rollout engine took (no effect on a dense model, nor in
    supervised fine-tuning)."""
    mtp_loss_scale: float = Field(0.0, ge=0)
    """Weight of the multi-token-prediction loss, the mean over the MTP layers; 0 leaves these layers as they are. 0.2
    keeps a draft up with the policy."""
    mtp_detach: bool = True
    """Train the MTP layers alone: their loss moves neither the policy's layers nor its embedding and output layer."""
    exact: bool = False
    """Log-probs of training equal those of the rollout bit for bit, so that their KL is 0 until the first step on a
    rollout. Slower; docs/exact.md says what it takes and where it is to be had."""
    qat: bool = False
    """Quantization-aware training: the forward pass sees weights rounded to the rollout's INT4 grid, of
    quantize.group_size, and their gradient goes straight through. Needs quantize.format=int4 or int4_linear."""
    fp8: bool = False
    """Products of linear layers and experts in e4m3, forward and backward: activations and gradients in blocks of
    1 x 128, weights of 128 x 128. Router, norms, embedding and output layer stay in `precision`. On a CPU emulated."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""
    distributed_optimizer: bool = False
    """Data-parallel ranks share master weights and moments (ZeRO stage 1) instead of holding copies."""
    gradient_precision: Literal["fp32", "bf16"] = "fp32"
    """Of the buffers in which gradients are added up over micro-batches and ranks."""
    recompute: Literal["none", "full"] = "none"
    """Activations of a layer: kept, or computed again in the backward pass from the layer's input."""
    critic_optimizer: OptimizerConfig | None = None
    """Those of PPO's critic; null takes the policy's."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallel layout."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""

    @property
    def data_parallel_size(self) -> int:
        """Model replicas: ranks divided by tensor, context and pipeline sizes."""
        return self.num_ranks // (self.parallel.tensor * self.parallel.context * self.parallel.pipeline)

    @model_validator(mode="after")
    def _layout_is_possible(self) -> "TrainerConfig":
        if self.fp8 and self.qat:
            raise ValueError("trainer.fp8=true and trainer.qat=true: a weight has one rounding; set one to false")
        if not self.mtp_detach and not self.mtp_loss_scale:
            raise ValueError("trainer.mtp_detach=false has no effect with trainer.mtp_loss_scale 0: set it above 0")
        p = self.parallel
        if self.distributed_optimizer and self.mtp_loss_scale:
            raise ValueError(
                f"trainer.distributed_optimizer=true with trainer.mtp_loss_scale {self.mtp_loss_scale}: MTP layers are "
                "clipped apart, and ranks hold stretches of gradients that cut across layers; set "
                "trainer.distributed_optimizer=false"
            )
        if self.mtp_loss_scale and p.context > 1:
            raise ValueError(
                f"trainer.mtp_loss_scale {self.mtp_loss_scale} with trainer.parallel.context {p.context}: MTP layers "
                "look back within a sequence, whose tokens then lie on several ranks; set trainer.mtp_loss_scale=0 or "
                "trainer.parallel.context=1"
            )
        model_parallel = p.tensor * p.context * p.pipeline
        if self.num_ranks % model_parallel:
            raise ValueError(
                f"trainer.num_ranks {self.num_ranks} is not a multiple of trainer.parallel.tensor {p.tensor} x context "
                f"{p.context} x pipeline {p.pipeline} = {model_parallel}"
            )
        stage = self.num_ranks // p.pipeline
        if stage % p.expert:
            raise ValueError(
                f"trainer.parallel.expert {p.expert} does not divide the {stage} ranks of a pipeline stage"
            )
        return self
