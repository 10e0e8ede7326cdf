import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import BOS, END_OF_TURN, EOS, TURNS, write_bpe, write_lossy
from transformers import AutoTokenizer

from conversion.character_tokenizer import EOS_ID, write_character_tokenizer
from miles_core.data.tokenization import LostCharacterError, Tokenizer, load_tokenizer

WITH_BOS = BOS + TURNS
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi there"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g")],
    },
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": " hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


def hugging_face(folder: Path) -> Any:
    """The bare tokenizer, to compare with."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def characters(tmp_path: Path) -> Tokenizer:
    write_character_tokenizer(tmp_path, 64)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [WITH_BOS, TURNS], ids=["template writes BOS", "template without BOS"])
def test_every_path_begins_with_one_bos(tmp_path: Path, template: str, adds_bos: bool) -> None:
    tokenizer = load_tokenizer(write_bpe(tmp_path, template, adds_bos=adds_bos))
    bos = hugging_face(tmp_path).bos_token_id
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.render(messages, apply_chat_template=True)
    paths = [
        tokenizer.encode_prompt(messages, apply_chat_template=True),  # a list of messages
        tokenizer.encode_prompt("hi", apply_chat_template=True),  # a plain string, which becomes one
        tokenizer.encode_prompt(rendered),  # text that was rendered before
        tokenizer.encode_conversation([*messages, {"role": "assistant", "content": ""}])[0][: -len("x\n")],
    ]
    wanted = 1 if adds_bos or template == WITH_BOS else 0
    for ids in paths:
        assert ids.dtype == np.int32
        assert ids.tolist() == paths[0].tolist()
        assert ids.tolist().count(bos) == wanted
        assert ids[0] == bos or not wanted


def test_plain_text_gets_the_bos_that_the_tokenizer_adds_but_no_eos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe(tmp_path, None, adds_bos=True))
    assert tokenizer.encode_prompt("hi").tolist() == hugging_face(tmp_path)("hi").input_ids


def test_system_prompt_and_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}tools: {{ tools[0].name }}\n{% endif %}" + TURNS
    tokenizer = load_tokenizer(write_bpe(tmp_path, template, adds_bos=False))
    rendered = tokenizer.render("hi", apply_chat_template=True, system_prompt="be brief", tools=[{"name": "f"}])
    assert rendered == "tools: f\n<|system|>be brief<|end|>\n<|user|>hi<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (EOS_ID, 5, 6, 7)),
        ({"eos_token_id": 6}, None, (EOS_ID, 6)),
        ({}, {"eos_token_id": None}, (EOS_ID,)),
        (None, None, (EOS_ID,)),
    ],
)
def test_stop_tokens_are_those_of_all_three_files(
    tmp_path: Path, generation: dict | None, model: dict | None, expected: tuple[int, ...]
) -> None:
    write_character_tokenizer(tmp_path, 64)
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).stop_token_ids == expected


def test_a_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, 64)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(ValueError, match=r"no end-of-sequence token in generation_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "decoded"),
    [("12<eos>", "12"), ("1<pad>2", "1<pad>2"), ("1<eos>2", "1<eos>2"), ("12<eos><eos>", "12<eos>"), ("", "")],
)
def test_decode_leaves_out_the_last_stop_token_only(characters: Tokenizer, text: str, decoded: str) -> None:
    assert characters.decode(characters.encode(text)) == decoded


@pytest.mark.parametrize(
    ("write", "text", "lost"),
    [
        (lambda out: write_character_tokenizer(out, 64), "abcé", "'é' (U+00E9) at position 3"),
        (write_lossy, "ab c", "' ' (U+0020) at position 2"),
        (write_lossy, "abca", "'c' (U+0063) at position 2"),
    ],
    ids=["tokenizer raises", "space left out", "letter left out"],
)
def test_a_character_without_token_is_an_error(tmp_path: Path, write, text: str, lost: str) -> None:
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(LostCharacterError) as error:
        tokenizer.encode(text)
    assert lost in str(error.value)


def test_bytes_express_every_character(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe(tmp_path, None, adds_bos=False))
    assert tokenizer.decode(tokenizer.encode("naïve 東京\t🙂")) == "naïve 東京\t🙂"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    "lists_end_of_turn", [True, False], ids=["end of turn in config", "end of turn in template only"]
)
def test_conversation_is_one_rendering_with_the_assistant_masked_in(
    tmp_path: Path, adds_bos: bool, lists_end_of_turn: bool
) -> None:
    write_bpe(tmp_path, WITH_BOS, adds_bos=adds_bos, lists_end_of_turn=lists_end_of_turn)
    tokenizer, backend = load_tokenizer(tmp_path), hugging_face(tmp_path)
    ids, mask = tokenizer.encode_conversation(CONVERSATION)
    assert ids.tolist() == backend.apply_chat_template(CONVERSATION, return_dict=True)["input_ids"]
    assert (mask.dtype, mask.shape) == (np.uint8, ids.shape)
    borders = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    spans = [backend.decode(ids[start:end]) for start, end in borders.reshape(-1, 2)]
    calls = "".join(f'{{"name": "{name}", "arguments": {{"x": 1}}}}' for name in ("f", "g"))
    assert spans == [calls + END_OF_TURN, " hello" + END_OF_TURN, "bye" + END_OF_TURN]


def test_conversation_mask_equals_that_of_generation_tags(characters: Tokenizer, tmp_path: Path) -> None:
    """The character tokenizer's template marks the assistant's text itself, and transformers reads the marks."""
    ids, mask = characters.encode_conversation(CONVERSATION)
    marked = hugging_face(tmp_path).apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == marked["input_ids"]
    assert mask.tolist() == marked["assistant_masks"]


def test_a_last_turn_without_end_token_reaches_to_the_end(tmp_path: Path) -> None:
    """As in GLM-4.5, where the next turn's first token ends a turn."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    write_bpe(tmp_path, template, adds_bos=False)
    backend = hugging_face(tmp_path)
    user = backend.convert_tokens_to_ids("<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [user]}))
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    ids, mask = load_tokenizer(tmp_path).encode_conversation(messages)
    assert backend.decode(ids[mask == 1]) == "assistant<|user|>assistant"


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    template = "{{ messages | length }}:" + TURNS
    tokenizer = load_tokenizer(write_bpe(tmp_path, template, adds_bos=False))
    with pytest.raises(ValueError, match="message 2: the chat template renders the messages before it differently"):
        tokenizer.encode_conversation(CONVERSATION)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe(tmp_path, None, adds_bos=False))
    with pytest.raises(ValueError, match=r"no chat template: set data\.apply_chat_template=false"):
        tokenizer.encode_prompt("hi", apply_chat_template=True)
    with pytest.raises(ValueError, match=r"needs data\.apply_chat_template=true"):
        tokenizer.encode_prompt([{"role": "user", "content": "hi"}])
    assert EOS not in tokenizer.render("hi")
