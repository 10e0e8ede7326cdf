"""Rows of a file of prompts or conversations, checked but not yet tokenized. Needs no torch and no tokenizer."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

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
    """All prompts of a JSONL file. Raises `DataError` with every faulty line, or when there is no row at all."""
    return _all_sound(_checked_rows(path, partial(_check_prompt, data=data)))


def read_conversations(path: Path) -> list[Row]:
    """All conversations of a JSONL file, messages under `messages`. Raises as `read_rows`."""
    return _all_sound(_checked_rows(path, _check_conversation))


def scan_prompts(path: Path, data: DataConfig) -> tuple[list[str], int]:
    """Faults of a JSONL file and its number of sound rows, without keeping the rows."""
    return _scan(_checked_rows(path, partial(_check_prompt, data=data)))


def scan_conversations(path: Path) -> tuple[list[str], int]:
    """The same for `read_conversations`."""
    return _scan(_checked_rows(path, _check_conversation))


def _all_sound(checked: Iterable[Row | str]) -> list[Row]:
    rows, faults = [], []
    for row in checked:
        if isinstance(row, str):
            faults.append(row)
        else:
            rows.append(row)
    if faults:
        raise DataError(faults)
    return rows


def _scan(checked: Iterable[Row | str]) -> tuple[list[str], int]:
    faults, count = [], 0
    for row in checked:
        if isinstance(row, str):
            faults.append(row)
        else:
            count += 1
    return faults, count


def _checked_rows(path: Path, check: Callable[[str, dict[str, Any]], Row | str]) -> Iterator[Row | str]:
    """For each line a row or its fault. Blank lines hold no row."""
    if not path.is_file():
        yield f"{path} is no file (data.prompts, data.eval_prompts, data.conversations)"
        return
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                parsed = _parse(line)
                origin = f"{path}:{number}"
                yield f"{origin}: {parsed}" if isinstance(parsed, str) else check(origin, parsed)
    if empty:
        yield f"{path} holds no rows: one JSON object a line is required"


def _parse(line: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"no valid JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"no valid UTF-8: {error.reason} at byte {error.start + 1}"
    return row if isinstance(row, dict) else f"a JSON object is required, found {type(row).__name__}"


def _check_prompt(origin: str, row: dict[str, Any], data: DataConfig) -> Row | str:
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


def _check_conversation(origin: str, row: dict[str, Any]) -> Row | str:
    messages, tools = row.get("messages"), row.get("tools")
    if not _is_messages(messages):
        return f"{origin}: 'messages' must be a list of messages with a role each, found {str(messages)[:80]!r}"
    if all(message["role"] != "assistant" for message in messages):
        return f"{origin}: no message is the assistant's, so there is nothing to learn"
    if tools is not None and not _is_list_of_objects(tools):
        return f"{origin}: tools must be a list of objects, found {str(tools)[:80]!r}"
    return Row(origin, messages, tools=tools)


def _prompt_fault(prompt: Any, data: DataConfig) -> str | None:
    name = f"{data.input_key!r} (data.input_key)"
    if isinstance(prompt, str):
        return None if prompt else f"{name} is empty"
    if not _is_messages(prompt):
        return f"{name} must be a string or a list of messages with a role each, found {str(prompt)[:80]!r}"
    return None if data.apply_chat_template else f"{name} holds messages: set data.apply_chat_template=true"


def _is_messages(value: Any) -> TypeGuard[Messages]:
    return _is_list_of_objects(value) and all(isinstance(message.get("role"), str) for message in value)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
