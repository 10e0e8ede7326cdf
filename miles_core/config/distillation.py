"""Teachers of on-policy distillation."""

from pydantic import Field

from miles_core.config.base import Section


class DistillationConfig(Section):
    """Models whose log-probs the policy is drawn to (algorithm.distill_kl_coef, algorithm.distill_top_k_coef)."""

    teachers: tuple[str, ...] = ()
    """Hugging Face folders with the policy's own tokenizer. Several count as the mean of their log-probs, which makes
    the loss the mean of their reverse KLs."""
    top_k: int = Field(16, ge=1)
    """Likeliest tokens of the teacher that algorithm.distill_top_k_coef compares at each position."""
