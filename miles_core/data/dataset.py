"""From rows to tokenized prompts, with an account of every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_core.config.data import DataConfig
from miles_core.config.run import RunConfig
from miles_core.data.rows import DataError, Row, read_rows
from miles_core.data.tasks import build_task
from miles_core.data.tokenization import LostCharacterError, Tokenizer
from miles_core.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one split; `account` = {"in": rows, "used": rows, "dropped": {reason: rows}}."""

    prompts: tuple[Prompt, ...]
    account: dict[str, Any]


def load_prompts(config: RunConfig, tokenizer: Tokenizer, split: Literal["train", "eval"]) -> PromptSet:
    """The training or the held-out prompts of a run. Raises `DataError` with all faults."""
    return tokenize_rows(load_rows(config.data, split), tokenizer, config.data)


def load_rows(data: DataConfig, split: Literal["train", "eval"]) -> list[Row]:
    """The same as written. Raises `DataError` with all faults."""
    if data.task is not None:
        return build_task(data.task).rows(split)
    path = data.prompts if split == "train" else data.eval_prompts
    if path is None:
        raise DataError([f"data.{'prompts' if split == 'train' else 'eval_prompts'} is not set"])
    return read_rows(Path(path), data)


def tokenize_rows(rows: Sequence[Row], tokenizer: Tokenizer, data: DataConfig) -> PromptSet:
    """Rendered and tokenized prompts; `Prompt.index` is the position among `rows`.

    Rows longer than `data.max_prompt_length` are dropped and counted; `DataError` when none is left, or with every row
    that holds a character which the tokenizer lacks.
    """
    prompts, faults, too_long = [], [], 0
    for index, row in enumerate(rows):
        text = tokenizer.render(
            row.prompt,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            tools=row.tools,
        )
        try:
            token_ids = tokenizer.encode(text)
        except LostCharacterError as error:
            faults.append(f"{row.origin}: {error}")
            continue
        if len(token_ids) > data.max_prompt_length:
            too_long += 1
            continue
        prompts.append(Prompt(index, text, token_ids, row.label, row.metadata))
    if faults:
        raise DataError(faults)
    if not prompts:
        raise DataError(
            [
                f"no prompt is left: {too_long} of {len(rows)} are longer than data.max_prompt_length "
                f"{data.max_prompt_length}"
            ]
        )
    return PromptSet(tuple(prompts), {"in": len(rows), "used": len(prompts), "dropped": {"too_long": too_long}})
