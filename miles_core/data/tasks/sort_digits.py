"""`sort_digits`: "312=" asks for "123". A model with random weights learns it within minutes on a CPU."""

import random
from collections import Counter

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
        """Points of the response divided by n + 1, for an answer of n digits:

        - for each digit half a point if it is in the response, as often as the answer has it, and half a point if it
          stands at its place;
        - one point for the length, less 1/n for each character too many or too few.

        Where "123" is wanted it scores 1, "132" 3/4, "12" 2/3, "1234" 11/12, "123456" 3/4 and "" 0. Graded in this way
        a random model gets signals from the start: to use digits, those of the prompt, in order, and to stop.
        """
        answer, wanted = response.strip(), str(prompt.label)
        n = len(wanted)
        present = (Counter(answer) & Counter(wanted)).total()
        in_place = sum(found == digit for found, digit in zip(answer, wanted, strict=False))
        length = max(0.0, 1 - abs(len(answer) - n) / n)
        return Score((present / 2 + in_place / 2 + length) / (n + 1), answer_found=bool(answer))
