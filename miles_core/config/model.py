"""Which model is trained, and in which number format the rollout engine holds it."""

from typing import Literal

from pydantic import Field, model_validator

from miles_core.config.base import Section


class RandomModelConfig(Section):
    """A GLM-4.5-type mixture of experts with random weights and a character tokenizer, made locally.

    The first `num_dense_layers` layers are dense, the rest have routed experts and one shared expert; the router is a
    sigmoid with a correction bias; `num_mtp_layers` multi-token-prediction layers follow in the checkpoint.
    """

    num_layers: int = Field(2, ge=2, le=64)
    """Decoder layers, MTP layers not counted."""
    num_dense_layers: int = Field(1, ge=0)
    """How many of the first layers have a dense MLP; fewer than `num_layers`."""
    hidden_size: int = Field(64, ge=16, multiple_of=8)
    """Width of the residual stream."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int = Field(2, ge=1)
    """Key and value heads; must divide `num_heads`."""
    head_dim: int = Field(16, ge=4, multiple_of=4)
    """Width of one head."""
    ffn_hidden_size: int = Field(128, ge=8)
    """Width of the dense MLP."""
    num_experts: int = Field(8, ge=2)
    """Routed experts of a MoE layer."""
    top_k: int = Field(2, ge=1)
    """Experts chosen for a token."""
    moe_ffn_hidden_size: int = Field(32, ge=8)
    """Width of one routed expert, and of the shared one."""
    num_mtp_layers: int = Field(1, ge=0, le=4)
    """Multi-token-prediction layers in the checkpoint."""
    max_position: int = Field(512, ge=16)
    """Longest sequence in tokens."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights."""

    @model_validator(mode="after")
    def _shape_is_possible(self) -> "RandomModelConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is larger than num_experts {self.num_experts}")
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers {self.num_dense_layers} must be smaller than num_layers {self.num_layers}"
            )
        return self


class ModelConfig(Section):
    """The model that a run starts from: exactly one of `path` and `random`."""

    path: str | None = None
    """`hf://organisation/name` on the Hugging Face Hub (or in its local cache), or a local Hugging Face folder."""
    revision: str | None = None
    """Commit, tag or branch of an `hf://` model; the commit it resolves to is recorded."""
    random: RandomModelConfig | None = None
    """Make a small random model locally instead."""
    mtp_num_layers: int | None = Field(None, ge=0)
    """MTP layers to convert; null takes all that the checkpoint has, 0 leaves them out."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.random is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of model.path and model.random must be set, found {found}")
        if self.revision is not None and not (self.path or "").startswith("hf://"):
            raise ValueError(f"model.revision {self.revision!r} needs an hf:// model.path, found {self.path!r}")
        return self


class QuantizeConfig(Section):
    """Number format of the rollout engine's weights, and of the second export. Training stays in `trainer.precision`,
    `trainer.qat` and `trainer.fp8`."""

    format: Literal["none", "fp8", "int4", "int4_linear"] = "none"
    """none: as trained. fp8: e4m3 in blocks of 128 x 128. int4: symmetric groups along the input, routed experts only.
    int4_linear: the same in every linear layer but router, embedding and output layer."""
    group_size: int = Field(128, ge=1)
    """Length of an INT4 group; must divide the input width of every quantized tensor."""
