"""What the loop asks of a trainer. One object stands for all ranks; miles_core/cluster/ spreads it over processes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from miles_core.types import TrainSample


class Trainer(Protocol):
    """A model under training."""

    def log_probs(self, batch: Sequence[TrainSample], model: Literal["policy", "reference"]) -> list[np.ndarray]:
        """Log-probs of the response tokens, float32 [R] each, in the order of the batch, logits / temperature."""
        ...

    def values(self, batch: Sequence[TrainSample]) -> list[np.ndarray]:
        """PPO: the critic's value before each response token, float32 [R] each, in the order of the batch."""
        ...

    def train_step(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        """One optimizer step on a global batch; metrics are of the whole batch. A non-finite gradient leaves the
        weights as they are and is reported as `train/skipped_steps` = 1."""
        ...

    def train_critic(self, batch: Sequence[TrainSample]) -> dict[str, float]:
        """PPO: one step of the critic's optimizer, as `train_step` is one of the policy's; metrics `train/critic-*`."""
        ...

    def refresh_reference(self) -> None:
        """Sets the reference model to the policy's present weights."""
        ...

    def save(self, folder: Path) -> None:
        """Writes model, critic, optimizers, schedule and RNG state in torch_dist format."""
        ...

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, also at another parallel layout."""
        ...

    def close(self) -> None:
        """Leaves the process groups."""
        ...


class TrainerRank(Trainer, Protocol):
    """One rank of it. Collective: every rank makes the same calls with the same arguments and gets the same results."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors under Hugging Face names, MTP layers included, in a fixed order, one at a time."""
        ...
