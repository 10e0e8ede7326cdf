"""Conversations for supervised fine-tuning: ids, and which of them are learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.data.rows import DataError, Row
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


def tokenize_conversations(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> ConversationSet:
    """Conversations cut at `max_length` tokens; those in which nothing is left to learn are dropped and counted.

    Raises `DataError` when nothing is left in any of them: a loss over no token would be shown as 0.
    """
    kept, truncated = [], 0
    for index, row in enumerate(rows):
        if isinstance(row.prompt, str):
            raise DataError([f"{row.origin}: supervised fine-tuning needs a list of messages, found a string"])
        ids, mask = tokenizer.encode_conversation(row.prompt, row.tools)
        if mask[:max_length].any():
            kept.append(Conversation(index, ids[:max_length], mask[:max_length]))
            truncated += len(ids) > max_length
    if not kept:
        raise DataError(
            [f"none of {len(rows)} rows has a token of the assistant within the limit of {max_length} tokens"]
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
