"""Advantages, losses and corrections. Formulas stand in the docstrings of miles_core/algorithms/."""

from typing import Literal

from pydantic import Field, model_validator

from miles_core.config.base import Section


class OffPolicyConfig(Section):
    """Correction of the difference between rollout and training log-probs."""

    method: Literal["none", "tis", "mis", "icepop"] = "none"
    """tis: importance weights, bounded by `mode`. mis: the same, and tokens or sequences outside the rejection bounds
    are left out. icepop: the token's ratio inside [lower, upper], else nothing."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token, product over the sequence, or geometric mean over it."""
    mode: Literal["truncate", "clip", "mask"] | None = None
    """truncate: min(w, upper). clip: into [lower, upper]. mask: weight 0 outside. null: the method's own, truncate for
    tis and mis, mask for icepop."""
    lower: float = Field(0.5, ge=0)
    """Lower bound of the weight (clip, mask)."""
    upper: float = Field(2.0, gt=0)
    """Upper bound of the weight."""
    rejection_level: Literal["token", "sequence", "geometric"] | None = None
    """Which ratio mis tests against the rejection bounds; null takes `level`."""
    rejection_lower: float | None = Field(None, ge=0)
    """mis leaves out what lies below; null takes `lower`."""
    rejection_upper: float | None = Field(None, gt=0)
    """mis leaves out what lies above; null takes `upper`."""
    veto_threshold: float | None = Field(None, gt=0, lt=1)
    """Reject a whole sequence when the ratio of any of its tokens falls below this."""

    @model_validator(mode="after")
    def _options_take_effect(self) -> "OffPolicyConfig":
        faults = []
        defaults = type(self).model_fields
        changed = {name: value for name, value in self if value != defaults[name].default}
        if self.method == "none":
            faults += [f"off_policy.{n}={v} has no effect with off_policy.method=none" for n, v in changed.items()]
        if self.method != "mis":
            names = [name for name in changed if name.startswith("rejection_")]
            faults += [f"off_policy.{n}={changed[n]} needs off_policy.method=mis, found {self.method}" for n in names]
        if self.method == "icepop" and (self.level, self.mode) not in (("token", None), ("token", "mask")):
            faults.append(
                f"off_policy.method=icepop is level=token with mode=mask, found level={self.level}, mode={self.mode}; "
                "off_policy.method=tis takes any"
            )
        for low, high in (("lower", "upper"), ("rejection_lower", "rejection_upper")):
            lower = getattr(self, low) if getattr(self, low) is not None else self.lower
            upper = getattr(self, high) if getattr(self, high) is not None else self.upper
            if lower >= upper:
                faults.append(f"off_policy.{low} {lower} must be below off_policy.{high} {upper}")
        if faults:
            raise ValueError("; ".join(dict.fromkeys(faults)))
        return self


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "none"
    ] = "grpo"
    """How rewards become advantages. ppo needs a critic. none: no reward enters (SFT, pure distillation)."""
    policy_loss: Literal["ppo_clip", "gspo", "cispo", "sft"] = "ppo_clip"
    """ppo_clip: token ratio, clipped. gspo: sequence ratio, clipped. cispo: clipped weight on the log-prob. sft:
    cross-entropy of the trainable tokens."""
    loss_aggregation: Literal["sample_mean", "token_mean", "constant"] = "sample_mean"
    """Mean over each sample's tokens and then over samples; mean over all tokens; or sum over tokens divided by
    samples x `rollout.sampling.max_new_tokens` (Dr. GRPO). Always over the global batch."""
    eps_clip: float = Field(0.2, gt=0, le=1)
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
    """Weight of the KL to the reference model in the reward (REINFORCE++ and PPO)."""
    kl_type: Literal["k1", "k2", "k3", "low_var"] = "low_var"
    """Estimator of the KL; low_var is k3 with its terms clamped."""
    kl_unbiased: bool = False
    """Multiply the KL of the loss by the importance ratio, which makes its gradient unbiased off policy."""
    ref_update_interval: int | None = Field(None, ge=1)
    """Refresh the reference model with the policy's weights each so many rollouts; null keeps the initial one."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of REINFORCE++ and PPO returns, per trainable token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """GAE (PPO): 1 is the return less the value, 0 the one-step difference."""
    value_clip: float = Field(0.2, gt=0)
    """PPO's critic: a value may leave its old one by this much before its loss stops rewarding it."""
    critic_warmup_rollouts: int = Field(0, ge=0)
    """PPO: for so many first rollouts only the critic is trained."""
    normalize_advantages: bool = False
    """Whiten advantages over the trainable tokens of the whole rollout."""
    distill_kl_coef: float = Field(0.0, ge=0)
    """On-policy distillation: the advantage loses this times (student - teacher) log-prob of each token."""
    distill_top_k_coef: float = Field(0.0, ge=0)
    """On-policy distillation: weight of the reverse KL over the teacher's top-k tokens in the loss."""
    overlong_buffer: int | None = Field(None, ge=1)
    """DAPO: the reward falls linearly by up to 1 over the last so many tokens before rollout.sampling.max_new_tokens;
    null turns it off."""
    opsm_delta: float | None = Field(None, ge=0)
    """Off-policy sequence masking: drop tokens of negative advantage in sequences from which the policy moved by more
    than this (mean old - new log-prob); null turns it off."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """Correction between rollout and training log-probs."""

    @model_validator(mode="after")
    def _options_agree(self) -> "AlgorithmConfig":
        estimator, loss = self.advantage_estimator, self.policy_loss
        plus_plus = estimator.startswith("reinforce_plus_plus")
        faults = []
        if self.kl_coef and self.kl_loss_coef:
            faults.append(
                f"algorithm.kl_coef {self.kl_coef} and algorithm.kl_loss_coef {self.kl_loss_coef}: set one of them to 0"
            )
        if plus_plus and not self.normalize_advantages:
            faults.append(f"{estimator} needs algorithm.normalize_advantages=true")
        if self.kl_coef and not (plus_plus or estimator == "ppo"):
            faults.append(f"algorithm.kl_coef {self.kl_coef} has no effect on {estimator}: use kl_loss_coef")
        if self.kl_unbiased and not self.kl_loss_coef:
            faults.append("algorithm.kl_unbiased=true has no effect without algorithm.kl_loss_coef")
        if self.gamma != 1 and estimator not in ("reinforce_plus_plus", "ppo"):
            faults.append(f"algorithm.gamma {self.gamma} has no effect on {estimator}: leave it at 1")
        if self.gae_lambda != 1 and estimator != "ppo":
            faults.append(f"algorithm.gae_lambda {self.gae_lambda} has no effect on {estimator}: leave it at 1")
        if self.critic_warmup_rollouts and estimator != "ppo":
            faults.append(f"algorithm.critic_warmup_rollouts {self.critic_warmup_rollouts} has no effect without ppo")
        if estimator == "gspo" and loss != "gspo":
            faults.append(f"advantage_estimator=gspo needs policy_loss=gspo, found {loss}; grpo goes with any loss")
        if estimator == "none" and loss != "sft" and not (self.distill_kl_coef or self.distill_top_k_coef):
            faults.append(
                "advantage_estimator=none leaves nothing to learn from: set policy_loss=sft, distill_kl_coef or "
                "distill_top_k_coef"
            )
        if loss == "sft":
            faults += self._faults_of_sft()
        elif loss == "cispo" and self.eps_clip_c is not None:
            faults.append(f"algorithm.eps_clip_c {self.eps_clip_c} has no effect on policy_loss=cispo: set it to null")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _faults_of_sft(self) -> list[str]:
        """Options that presume sampled responses."""
        faults = []
        if self.advantage_estimator != "none":
            faults.append(f"policy_loss=sft needs advantage_estimator=none, found {self.advantage_estimator}")
        for name in ("eps_clip_c", "overlong_buffer", "opsm_delta"):
            if (value := getattr(self, name)) is not None:
                faults.append(f"algorithm.{name} {value} has no effect on policy_loss=sft: set it to null")
        for name in ("distill_kl_coef", "normalize_advantages"):
            if value := getattr(self, name):
                faults.append(f"algorithm.{name}={value} has no effect on policy_loss=sft")
        if self.off_policy.method != "none":
            faults.append(f"off_policy.method={self.off_policy.method} has no effect on policy_loss=sft")
        return faults

    @property
    def is_supervised(self) -> bool:
        """Whether given answers are learned: nothing is sampled, so no rollout engine runs."""
        return self.policy_loss == "sft"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is held."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.advantage_estimator == "ppo"

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's log-probs are asked for."""
        return self.distill_kl_coef > 0 or self.distill_top_k_coef > 0
