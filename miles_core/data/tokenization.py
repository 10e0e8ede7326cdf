"""Text to ids and back: one beginning-of-sequence token, nothing lost in silence, on every path."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data.rows import Messages


class LostCharacterError(ValueError):
    """Text with a character that the vocabulary cannot express."""


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a Hugging Face folder; nothing is fetched."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Tokenizer(backend, _stop_token_ids(folder, backend.eos_token_id))


def _stop_token_ids(folder: Path, tokenizer_eos: int | None) -> set[int]:
    """End-of-sequence tokens by generation_config.json, config.json and the tokenizer. They often differ in chat
    models, where each of them ends a response."""
    found = {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found.update(eos if isinstance(eos, list) else [eos])
    return {token for token in found if token is not None}


class Tokenizer:
    """A Hugging Face tokenizer with this project's conventions; `stop_token_ids` end a response."""

    def __init__(self, backend: Any, stop_token_ids: Iterable[int]) -> None:
        self._backend = backend
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        if not self.stop_token_ids:
            raise ValueError(
                "no end-of-sequence token in generation_config.json, config.json and tokenizer_config.json"
            )
        self._eos = self.stop_token_ids[0] if backend.eos_token_id is None else backend.eos_token_id
        bos = backend.bos_token_id
        self._bos = bos if bos is not None and backend("").input_ids[:1] == [bos] else None
        self._added = re.compile("|".join(map(re.escape, sorted(backend.get_added_vocab(), key=len, reverse=True))))
        self._lost: dict[str, bool] = {}

    def render(
        self,
        prompt: str | Messages,
        *,
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        tools: Messages | None = None,
    ) -> str:
        """The prompt as text. With the chat template a plain string is one user message, and the text ends where the
        assistant's answer begins."""
        if not apply_chat_template:
            if not isinstance(prompt, str):
                raise ValueError("a prompt of messages needs data.apply_chat_template=true")
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system_prompt is not None:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return self._apply_template(messages, tools, add_generation_prompt=True)

    def encode(self, text: str) -> np.ndarray:
        """Ids of rendered text, int32 [T].

        Begins with one BOS if the tokenizer adds one to text, whether or not a template wrote it already. An EOS that
        some tokenizers append is left out. Raises `LostCharacterError`.
        """
        self._refuse_lost_characters(text)
        return np.array(self._with_bos(self._backend.encode(text, add_special_tokens=False)), dtype=np.int32)

    def encode_answer(self, text: str) -> np.ndarray:
        """Ids of a whole response, int32 [R]: of the text, without BOS, and the end-of-sequence token."""
        self._refuse_lost_characters(text)
        return np.array([*self._backend.encode(text, add_special_tokens=False), self._eos], dtype=np.int32)

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id, added ones included."""
        return dict(self._backend.get_vocab())

    def encode_prompt(
        self,
        prompt: str | Messages,
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        tools: Messages | None = None,
    ) -> np.ndarray:
        """`encode` of `render`: int32 [P]."""
        return self.encode(
            self.render(prompt, apply_chat_template=apply_chat_template, system_prompt=system_prompt, tools=tools)
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of a response, without the stop token at its end. Other special tokens are shown: a reward should see
        what was sampled."""
        tokens = [int(token) for token in ids]
        if tokens and tokens[-1] in self.stop_token_ids:
            tokens.pop()
        return str(self._backend.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_conversation(self, messages: Messages, tools: Messages | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [T] of one rendering of the whole conversation, and the loss mask uint8 [T]: 1 on what the
        assistant says in each of its turns, its end-of-turn token included.

        A turn begins where the generation prompt of the messages before it ends, and ends with the first stop or
        end-of-turn token, or with the text. Raises ValueError for a template that renders earlier messages anew later.
        """
        text = self._apply_template(messages, tools, add_generation_prompt=False)
        self._refuse_lost_characters(text)
        encoding = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoding.input_ids, dtype=np.int32)
        token_starts = np.array([start for start, _ in encoding.offset_mapping])
        ends = np.flatnonzero(np.isin(ids, [*self.stop_token_ids, *self._end_of_turn()]))
        mask = np.zeros(len(ids), dtype=np.uint8)
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._apply_template(messages[:position], tools, add_generation_prompt=True)
            if not text.startswith(before):
                raise ValueError(
                    f"message {position}: the chat template renders the messages before it differently alone than in "
                    "the whole conversation, so the assistant's span is unknown; change the tokenizer's chat_template"
                )
            first = int(np.searchsorted(token_starts, len(before)))
            last = next((int(end) for end in ends if end >= first), len(ids) - 1)
            mask[first : last + 1] = 1
        with_bos = self._with_bos(ids.tolist())
        return np.array(with_bos, dtype=np.int32), np.pad(mask, (len(with_bos) - len(ids), 0))

    def _apply_template(self, messages: Messages, tools: Messages | None, add_generation_prompt: bool) -> str:
        if self._backend.chat_template is None:
            raise ValueError("the tokenizer has no chat template: set data.apply_chat_template=false")
        return str(
            self._backend.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _end_of_turn(self) -> list[int]:
        """The special token that the template puts after an assistant's text, if any; configs do not always list it."""
        probe = "0"  # a character that any vocabulary has
        messages = [{"role": "user", "content": probe}, {"role": "assistant", "content": probe}]
        after = self._apply_template(messages, None, add_generation_prompt=False).rpartition(probe)[2].lstrip()
        match = self._added.match(after)
        return [self._backend.convert_tokens_to_ids(match.group())] if match and match.group() else []

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def _refuse_lost_characters(self, text: str) -> None:
        for character in sorted(set(self._added.sub("", text))):
            if character not in self._lost:
                self._lost[character] = self._is_lost(character)
            if self._lost[character]:
                raise LostCharacterError(
                    f"character {character!r} (U+{ord(character):04X}) at position {text.index(character)} of "
                    f"{text[:60]!r} is not in the tokenizer's vocabulary"
                )

    def _is_lost(self, character: str) -> bool:
        """Whether a character has no id, or <unk> or another special token in its place: the model would not see it."""
        try:
            ids = self._backend.encode(character, add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing more specific for a vocabulary without <unk>
            if "UNK" not in str(error):
                raise
            return True
        return not ids or bool(set(ids) & set(self._backend.all_special_ids))
