"""The order of prompts or conversations over a run, and where in it the run stands."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from miles_core.data.conversations import Conversation
from miles_core.data.rows import DataError
from miles_core.seeds import derive_seed
from miles_core.types import Prompt

Item = TypeVar("Item", Prompt, Conversation)


class PromptSource(Generic[Item]):
    """Endless prompts (or conversations), each exactly once an epoch. A batch may span the border of two epochs, or
    several epochs.

    The order of an epoch depends on the seed and the epoch alone, so (epoch, offset) is all there is to save.
    """

    def __init__(self, prompts: Sequence[Item], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError(["no prompts to draw from"])
        self._prompts: Sequence[Item] = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._digest = _digest(prompts)
        self._epoch, self._offset = 0, 0
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """Whole passes over the prompts that were served."""
        return self._epoch

    def next(self, n: int) -> list[Item]:
        """The next `n` prompts."""
        batch: list[Item] = []
        while len(batch) < n:
            taken = self._order[self._offset : self._offset + n - len(batch)]
            batch += [self._prompts[i] for i in taken]
            self._offset += len(taken)
            if self._offset == len(self._order):
                self._epoch, self._offset = self._epoch + 1, 0
                self._order = self._epoch_order()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Position, and what it is a position in; JSON."""
        return {"epoch": self._epoch, "offset": self._offset, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. Raises `DataError` for one in another data set or order."""
        other = [
            f"{name} is {mine!r}, the saved state has {state.get(name)!r}"
            for name, mine in self._identity().items()
            if state.get(name) != mine
        ]
        if other:
            raise DataError(
                [f"the saved position is not one in these {len(self._prompts)} prompts: " + "; ".join(other)]
            )
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._order = self._epoch_order()

    def _identity(self) -> dict[str, Any]:
        return {"prompts": self._digest, "seed": self._seed, "shuffle": self._shuffle}

    def _epoch_order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng(derive_seed(self._seed, "prompts", self._epoch)).permutation(len(self._prompts))


def _digest(items: Sequence[Prompt | Conversation]) -> str:
    digest = hashlib.sha256()
    for item in items:
        aim = item.label if isinstance(item, Prompt) else item.loss_mask.tolist()
        digest.update(json.dumps([item.index, item.token_ids.tolist(), aim], default=str).encode())
    return digest.hexdigest()
