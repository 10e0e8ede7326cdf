"""Rows of a prompt file, checked but not yet tokenized. Needs no torch and no tokenizer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.config.data import DataConfig

_MOST_FAULTS_SHOWN = 20

Messages = list[dict[str, Any]]


class DataError(ValueError):
    """Faults of a data set, all that were found."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        shown = self.faults[:_MOST_FAULTS_SHOWN]
        if left := len(self.faults) - len(shown):
            shown.append(f"... and {left} more faults")
        super().__init__("\n".join(shown))


@dataclass(frozen=True)
class Row:
    """A prompt as written: text, or chat messages for the tokenizer's template."""

    origin: str  # for messages: "prompts.jsonl:17"
    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: Messages | None = None  # JSON schemas of functions, for the chat template


def read_rows(path: Path, data: DataConfig) -> list[Row]:
    """All rows of a JSONL file. Raises `DataError` with every faulty line, or when there is no row at all."""
    checked = list(_checked_rows(path, data))
    if faults := [row for row in checked if isinstance(row, str)]:
        raise DataError(faults)
    return [row for row in checked if isinstance(row, Row)]


def scan_prompts(path: Path, data: DataConfig) -> tuple[list[str], int]:
    """Faults of a JSONL file and its number of sound rows, without keeping the rows."""
    faults, count = [], 0
    for row in _checked_rows(path, data):
        if isinstance(row, str):
            faults.append(row)
        else:
            count += 1
    return faults, count


def _checked_rows(path: Path, data: DataConfig) -> Iterator[Row | str]:
    """For each line a row or its fault. Blank lines hold no row."""
    if not path.is_file():
        yield f"{path} is no file (data.prompts, data.eval_prompts)"
        return
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                yield _check_row(f"{path}:{number}", line, data)
    if empty:
        yield f"{path} holds no rows: one JSON object a line is required"


def _check_row(origin: str, line: bytes, data: DataConfig) -> Row | str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"{origin}: no valid JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"{origin}: no valid UTF-8: {error.reason} at byte {error.start + 1}"
    if not isinstance(row, dict):
        return f"{origin}: a JSON object is required, found {type(row).__name__}"
    for key, option in ((data.input_key, "input_key"), (data.label_key, "label_key")):
        if key is not None and key not in row:
            return f"{origin}: no field {key!r} (data.{option}), found {sorted(row)}"
    prompt, metadata, tools = row[data.input_key], row.get("metadata", {}), row.get("tools")
    if fault := _prompt_fault(prompt, data):
        return f"{origin}: {fault}"
    if not isinstance(metadata, dict):
        return f"{origin}: metadata must be an object, found {type(metadata).__name__}"
    if tools is not None and not (_is_list_of_objects(tools) and data.apply_chat_template):
        return f"{origin}: tools must be a list of objects, and data.apply_chat_template true"
    label = row[data.label_key] if data.label_key is not None else None
    return Row(origin, prompt, label, metadata, tools)


def _prompt_fault(prompt: Any, data: DataConfig) -> str | None:
    name = f"{data.input_key!r} (data.input_key)"
    if isinstance(prompt, str):
        return None if prompt else f"{name} is empty"
    if not (_is_list_of_objects(prompt) and all(isinstance(message.get("role"), str) for message in prompt)):
        return f"{name} must be a string or a list of messages with a role each, found {str(prompt)[:80]!r}"
    return None if data.apply_chat_template else f"{name} holds messages: set data.apply_chat_template=true"


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
