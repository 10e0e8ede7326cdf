"""What an advantage estimator sees of a sample."""

from dataclasses import dataclass

import numpy as np

PER_TOKEN = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "values", "rollout_log_probs")


class NonFiniteInputError(ValueError):
    """A NaN or an infinity where training would silently be ruined by it."""


@dataclass(frozen=True)
class SampleView:
    """A scored response of R tokens. Fields other than loss_mask may be anything where it is 0.

    Raises:
        ValueError: a per-token field is not R long.
    """

    index: int  # Sample.index, for messages
    reward: float | None  # None: unscored, left out of its group; allowed only if fully masked or no reward is used
    loss_mask: np.ndarray  # [R], nonzero on trainable tokens
    old_log_probs: np.ndarray | None = None  # [R], the student's; for kl_coef and distill_kl_coef
    ref_log_probs: np.ndarray | None = None  # [R], for kl_coef
    teacher_log_probs: np.ndarray | None = None  # [R], for distill_kl_coef
    values: np.ndarray | None = None  # [R], the critic's before each token; for ppo
    rollout_log_probs: np.ndarray | None = None  # [R], the engine's; only checked here, the loss uses them

    def __post_init__(self) -> None:
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != len(self.loss_mask):
                raise ValueError(
                    f"sample {self.index}: {name} has {len(value)} entries, loss_mask {len(self.loss_mask)}"
                )

    @property
    def trainable(self) -> np.ndarray:
        """bool [R]."""
        return np.asarray(self.loss_mask) != 0

    def on_trainable(self, name: str) -> np.ndarray:
        """The named per-token field at the trainable tokens, float64.

        Raises:
            ValueError: the field is None though the configured estimator needs it.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"sample {self.index}: the configured algorithm needs {name}, found None")
        return np.asarray(value, np.float64)[self.trainable]

    def check_finite(self) -> None:
        """
        Raises:
            NonFiniteInputError: the reward, or a per-token field at a trainable token, is NaN or infinite.
        """
        if self.reward is not None and not np.isfinite(self.reward):
            raise NonFiniteInputError(f"sample {self.index}: reward is {self.reward}; a reward must be finite")
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is None:
                continue
            bad = np.flatnonzero(self.trainable & ~np.isfinite(value))
            if len(bad):
                raise NonFiniteInputError(
                    f"sample {self.index}: {name} is {value[bad[0]]} at response token {bad[0]} ({len(bad)} of "
                    f"{len(value)} tokens); trainable tokens need finite values"
                )
