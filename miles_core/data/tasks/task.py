"""What a generated task offers."""

from typing import Literal, Protocol

from miles_core.data.rows import Row
from miles_core.types import Prompt, Score

Split = Literal["train", "eval"]


class Task(Protocol):
    """Prompts made by a rule, and the rule that scores answers to them."""

    def rows(self, split: Split) -> list[Row]:
        """The prompts of a split: the same for the same config, and none in both splits."""
        ...

    def score(self, prompt: Prompt, response: str) -> Score:
        """The score of a response, in [0, 1]."""
        ...
