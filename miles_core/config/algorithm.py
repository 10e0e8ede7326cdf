"""Advantages, losses and corrections. Formulas stand in the docstrings of miles_core/algorithms/."""

from typing import Literal

from pydantic import Field, model_validator

from miles_core.config.base import Section


class OffPolicyConfig(Section):
    """Correction of the difference between rollout and training log-probs."""

    method: Literal["none", "tis", "mis", "icepop"] = "none"
    """tis: truncated importance weights. mis: weights with masking. icepop: tokens outside the bounds weigh nothing."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token, product over the sequence, or geometric mean over it."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: min(w, upper). clip: into [lower, upper]. mask: weight 0 outside."""
    lower: float = Field(0.5, ge=0)
    """Lower bound of the weight (clip, mask, icepop)."""
    upper: float = Field(2.0, gt=0)
    """Upper bound of the weight."""
    veto_threshold: float | None = Field(None, gt=0, lt=1)
    """Reject a whole sequence when the ratio of any of its tokens falls below this."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "OffPolicyConfig":
        if self.lower >= self.upper:
            raise ValueError(f"off_policy.lower {self.lower} must be below off_policy.upper {self.upper}")
        return self


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """How rewards become advantages."""
    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    """ppo_clip: token ratio, clipped. gspo: sequence ratio, clipped. cispo: clipped weight on the log-prob."""
    loss_aggregation: Literal["sample_mean", "token_mean", "constant"] = "sample_mean"
    """Mean over each sample's tokens and then over samples; mean over all tokens; or sum over tokens divided by
    samples x `rollout.sampling.max_new_tokens` (Dr. GRPO). Always over the global batch."""
    eps_clip: float = Field(0.2, gt=0)
    """Lower clip: ratio >= 1 - eps_clip."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Upper clip: ratio <= 1 + eps_clip_high; null means eps_clip."""
    eps_clip_c: float | None = Field(None, gt=1)
    """Dual clip: for negative advantages the loss is at most -eps_clip_c x advantage; null turns it off."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the loss."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the reward (REINFORCE++ estimators)."""
    kl_type: Literal["k1", "k2", "k3", "low_var"] = "low_var"
    """Estimator of the KL; low_var is k3 with its terms clamped."""
    kl_unbiased: bool = False
    """Multiply the KL by the importance ratio, which makes its gradient unbiased off policy."""
    ref_update_interval: int | None = Field(None, ge=1)
    """Refresh the reference model with the policy's weights each so many rollouts; null keeps the initial one."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of REINFORCE++ returns."""
    normalize_advantages: bool = False
    """Whiten advantages over the trainable tokens of the whole rollout."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction between rollout and training log-probs."""

    @model_validator(mode="after")
    def _one_kl(self) -> "AlgorithmConfig":
        if self.kl_coef and self.kl_loss_coef:
            raise ValueError(
                f"algorithm.kl_coef {self.kl_coef} and algorithm.kl_loss_coef {self.kl_loss_coef}: set one of them to 0"
            )
        if self.advantage_estimator.startswith("reinforce_plus_plus") and not self.normalize_advantages:
            raise ValueError(f"{self.advantage_estimator} needs algorithm.normalize_advantages=true")
        if self.kl_coef and not self.advantage_estimator.startswith("reinforce_plus_plus"):
            raise ValueError(
                f"algorithm.kl_coef {self.kl_coef} has no effect on {self.advantage_estimator}: use kl_loss_coef"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is held."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0
