"""`sort_digits`: "312=" asks for "123". A model with random weights learns it within minutes on a CPU."""

import random

from pydantic import Field, ValidationError

from miles_core.config.base import Section
from miles_core.config.data import TaskConfig
from miles_core.config.faults import describe_faults
from miles_core.data.rows import DataError, Row
from miles_core.data.tasks.task import Split
from miles_core.seeds import derive_seed
from miles_core.types import Prompt, Score


class SortDigitsParams(Section):
    """`data.task.params` of sort_digits."""

    num_digits: int = Field(3, ge=1, le=18)
    """Digits of a prompt; a digit may occur several times."""


class SortDigits:
    """Prompts are drawn without replacement from all strings of `num_digits` digits.

    Held-out prompts are drawn first, so that another `train_size` leaves them as they are.
    """

    def __init__(self, config: TaskConfig) -> None:
        try:
            self._num_digits = SortDigitsParams(**config.params).num_digits
        except ValidationError as error:
            raise DataError(describe_faults(error, SortDigitsParams, "data.task.params.")) from None
        wanted, there = config.train_size + config.eval_size, 10**self._num_digits
        if wanted > there:
            raise DataError(
                [
                    f"data.task.train_size {config.train_size} + data.task.eval_size {config.eval_size} = {wanted} "
                    f"prompts, but {self._num_digits} digits make {there}: lower a size or raise "
                    "data.task.params.num_digits"
                ]
            )
        self._config = config

    def rows(self, split: Split) -> list[Row]:
        config = self._config
        rng = random.Random(derive_seed(config.seed, "sort_digits"))
        drawn: dict[str, None] = {}  # a set that keeps its order
        while len(drawn) < config.eval_size + config.train_size:
            drawn[f"{rng.randrange(10**self._num_digits):0{self._num_digits}d}"] = None
        chosen = list(drawn)[: config.eval_size] if split == "eval" else list(drawn)[config.eval_size :]
        return [
            Row(f"sort_digits {split} prompt {i}", f"{digits}=", "".join(sorted(digits)))
            for i, digits in enumerate(chosen)
        ]

    def score(self, prompt: Prompt, response: str) -> Score:
        """Characters that stand at their place, divided by the longer of answer and response: "123" wants "123", "132"
        scores 1/3, "12" 2/3, and "1234" 3/4."""
        answer = response.strip()
        hits = sum(found == wanted for found, wanted in zip(answer, prompt.label, strict=False))
        return Score(hits / max(len(answer), len(prompt.label)), answer_found=bool(answer))
