"""`reasoning_gym/NAME`: prompts and scorers of the reasoning-gym package."""

import re
from dataclasses import fields
from typing import Any

from miles_core.config.data import TaskConfig
from miles_core.config.faults import nearest
from miles_core.data.rows import DataError, Row
from miles_core.data.tasks.task import Split
from miles_core.types import Prompt, Score

PREFIX = "reasoning_gym/"
_DRAWS_PER_PROMPT = 20  # more repeats than this mean that the generator has hardly anything new to give
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymTask:
    """Entries 0, 1, ... of `reasoning_gym.create_dataset(NAME, seed, **params)`; a question that came before is passed
    over. The held-out prompts are the first ones, so that another `train_size` leaves them as they are."""

    def __init__(self, config: TaskConfig) -> None:
        import reasoning_gym.factory as factory

        self._config = config
        self._name = config.name.removeprefix(PREFIX)
        if self._name not in factory.DATASETS:
            raise DataError(
                [f"data.task.name: reasoning_gym has no data set {self._name!r}{nearest(self._name, factory.DATASETS)}"]
            )
        self._draws = _DRAWS_PER_PROMPT * (config.train_size + config.eval_size)
        known = {field.name for field in fields(factory.DATASETS[self._name][1])} - {"seed", "size"}
        if unknown := sorted(set(config.params) - known):
            raise DataError([f"unknown option data.task.params.{name}{nearest(name, known)}" for name in unknown])
        try:
            self._dataset = factory.create_dataset(
                self._name, **{**config.params, "seed": config.seed, "size": self._draws}
            )
        except (AssertionError, TypeError, ValueError) as error:  # what their own checks raise
            raise DataError([f"data.task.params {config.params} of {config.name}: {error}"]) from error

    def rows(self, split: Split) -> list[Row]:
        config = self._config
        wanted = config.eval_size if split == "eval" else config.eval_size + config.train_size
        by_question: dict[str, dict[str, Any]] = {}
        for draw in range(self._draws):
            if len(by_question) == wanted:
                break
            entry = self._dataset[draw]
            by_question.setdefault(entry["question"], entry)
        entries = list(by_question.values())
        if len(entries) < wanted:
            raise DataError(
                [
                    f"data.task.train_size {config.train_size} + data.task.eval_size {config.eval_size} = "
                    f"{config.train_size + config.eval_size} prompts, but {config.name} with params {config.params} "
                    f"gave only {len(entries)} different ones in {self._draws} draws: lower a size or widen the params"
                ]
            )
        return [
            Row(f"{config.name} {split} prompt {i}", entry["question"], entry["answer"], {"entry": entry})
            for i, entry in enumerate(entries if split == "eval" else entries[config.eval_size :])
        ]

    def score(self, prompt: Prompt, response: str) -> Score:
        """The data set's own score of the extracted answer, see `extract_answer`; 0 without one."""
        answer = extract_answer(response)
        if answer is None:
            return Score(0.0, answer_found=False)
        return Score(float(self._dataset.score_answer(answer, prompt.metadata["entry"])))


def extract_answer(response: str) -> str | None:
    """What stands in the last <answer>...</answer>, wherever it is; without such tags the last line that is not blank;
    None when that leaves nothing."""
    tagged = _ANSWER.findall(response)
    lines = response.strip().splitlines()
    found = tagged[-1] if tagged else lines[-1] if lines else ""
    return found.strip() or None
