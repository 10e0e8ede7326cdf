"""Conversations for supervised fine-tuning: ids, and which of them are learned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config.run import RunConfig
from miles_core.data.dataset import load_rows
from miles_core.data.rows import DataError, Row, read_conversations
from miles_core.data.tokenization import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """One tokenized conversation."""

    index: int  # row in the data set, unique
    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 on the assistant's tokens


@dataclass(frozen=True)
class ConversationSet:
    """`account` = {"in": rows, "used": rows, "truncated": rows among the used, "dropped": {reason: rows}}."""

    conversations: tuple[Conversation, ...]
    account: dict[str, Any]


def load_conversations(config: RunConfig, tokenizer: Tokenizer, max_length: int) -> ConversationSet:
    """What a supervised run learns: whole conversations, or prompts with their labels as the assistant's answers.

    `max_length`, in tokens, is that of the model; `data.max_conversation_length` may be lower. Raises `DataError`.
    """
    data = config.data
    limit = data.max_conversation_length or max_length
    if limit > max_length:
        raise DataError([f"data.max_conversation_length {limit} exceeds the {max_length} tokens that the model takes"])
    if data.conversations is not None:
        rows = read_conversations(Path(data.conversations))
    else:
        rows = load_rows(data, "train")
        if unanswered := [row.origin for row in rows if not isinstance(row.label, str)]:
            raise DataError([f"{origin}: supervised fine-tuning needs a text as label" for origin in unanswered])
        if data.apply_chat_template:
            rows = [_with_answer(row, data.system_prompt) for row in rows]
    return tokenize_conversations(rows, tokenizer, limit)


def tokenize_conversations(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> ConversationSet:
    """Conversations cut at `max_length` tokens; those in which nothing is left to learn are dropped and counted.

    A row holds messages, or a text whose label is the answer to it. Raises `DataError` when nothing is left in any of
    them: a loss over no token would be shown as 0.
    """
    kept, truncated = [], 0
    for index, row in enumerate(rows):
        ids, mask = _encode(row, tokenizer)
        if mask[1:max_length].any():  # nothing predicts the very first token
            kept.append(Conversation(index, ids[:max_length], mask[:max_length]))
            truncated += len(ids) > max_length
    if not kept:
        raise DataError(
            [
                f"none of {len(rows)} rows has a token of the assistant within the limit of {max_length} tokens "
                "(data.max_conversation_length, or the model's longest sequence)"
            ]
        )
    return ConversationSet(
        tuple(kept),
        {
            "in": len(rows),
            "used": len(kept),
            "truncated": truncated,
            "dropped": {"nothing_to_learn": len(rows) - len(kept)},
        },
    )


def _with_answer(row: Row, system_prompt: str | None) -> Row:
    prompt = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return replace(row, prompt=[*system, *prompt, {"role": "assistant", "content": row.label}], label=None)


def _encode(row: Row, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [T] and loss mask uint8 [T]."""
    if not isinstance(row.prompt, str):
        return tokenizer.encode_conversation(row.prompt, row.tools)
    if not isinstance(row.label, str):
        raise DataError(
            [
                f"{row.origin}: supervised fine-tuning needs a list of messages, or a text and as label the answer to "
                f"it, found the label {row.label!r}"
            ]
        )
    prompt, answer = tokenizer.encode(row.prompt), tokenizer.encode_answer(row.label)
    mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
    return np.concatenate([prompt, answer]), mask
