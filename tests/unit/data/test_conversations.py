"""What supervised fine-tuning learns from: whole conversations, or prompts with their labels as answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from conversion.character_tokenizer import EOS, write_character_tokenizer
from miles_core.config.run import RunConfig
from miles_core.data.conversations import load_conversations
from miles_core.data.rows import DataError, read_conversations, scan_conversations
from miles_core.data.tasks import build_task
from miles_core.data.tokenization import Tokenizer, load_tokenizer

TURNS = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and +1"},
    {"role": "assistant", "content": "3"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder, 64)
    return load_tokenizer(folder)


def supervised(data: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": data,
            "algorithm": {"advantage_estimator": "none", "policy_loss": "sft"},
            "rollout": {"n_samples_per_prompt": 1},
            **sections,
        }
    )


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def learned(tokenizer: Tokenizer, conversation: Any) -> str:
    return tokenizer.decode(conversation.token_ids[conversation.loss_mask == 1])


def test_every_turn_of_the_assistant_is_learned_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = lines(tmp_path / "chat.jsonl", {"messages": TURNS})
    data = {"conversations": str(path), "eval_prompts": "held-out.jsonl"}
    (conversation,) = load_conversations(supervised(data, reward={"type": "exact_match"}), tokenizer, 64).conversations
    text = tokenizer.decode(conversation.token_ids)
    assert text == f"<|user|>1+1<|assistant|>2{EOS}<|user|>and +1<|assistant|>3"
    assert learned(tokenizer, conversation) == f"2{EOS}3"


@pytest.mark.parametrize("chat", [False, True])
def test_a_generated_task_teaches_its_right_answers(tokenizer: Tokenizer, chat: bool) -> None:
    config = supervised({"task": {"train_size": 3, "eval_size": 2}, "apply_chat_template": chat})
    assert config.data.task is not None
    loaded = load_conversations(config, tokenizer, 64)
    assert loaded.account["in"] == loaded.account["used"] == 3
    for row, conversation in zip(build_task(config.data.task).rows("train"), loaded.conversations, strict=True):
        prompt_length = int((conversation.loss_mask == 0).sum())
        expected = tokenizer.encode_prompt(row.prompt, apply_chat_template=chat)  # the prompt is that of a rollout
        assert conversation.token_ids[:prompt_length].tolist() == expected.tolist()
        assert learned(tokenizer, conversation) == row.label
        assert conversation.token_ids[-1] in tokenizer.stop_token_ids


@pytest.mark.parametrize("limit", [10, None])
def test_nothing_to_learn_within_the_limit_names_the_option(tokenizer: Tokenizer, limit: int | None) -> None:
    task = {"train_size": 4, "eval_size": 1, "params": {"num_digits": 12}}
    config = supervised({"task": task, "max_conversation_length": limit})
    with pytest.raises(DataError, match=r"none of 4 rows .* limit of 10 tokens \(data.max_conversation_length, or"):
        load_conversations(config, tokenizer, 10)


def test_a_limit_beyond_the_model_is_refused(tokenizer: Tokenizer) -> None:
    config = supervised({"task": {"train_size": 4, "eval_size": 1}, "max_conversation_length": 65})
    with pytest.raises(DataError, match=r"data\.max_conversation_length 65 exceeds the 64 tokens that the model takes"):
        load_conversations(config, tokenizer, 64)


def test_a_prompt_without_an_answer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = lines(tmp_path / "p.jsonl", {"input": "1+1=", "label": "2"}, {"input": "1+2=", "label": 3})
    config = supervised({"prompts": str(path), "eval_prompts": str(path)}, reward={"type": "exact_match"})
    with pytest.raises(DataError, match=r"p.jsonl:2: supervised fine-tuning needs a text as label"):
        load_conversations(config, tokenizer, 64)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"input": "x"}, "'messages' must be a list of messages with a role each, found 'None'"),
        ({"messages": [{"content": "x"}]}, "'messages' must be a list of messages with a role each"),
        ({"messages": TURNS[:1]}, "no message is the assistant's, so there is nothing to learn"),
        ({"messages": TURNS, "tools": {"name": "f"}}, "tools must be a list of objects, found \"{'name': 'f'}\""),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path: Path, row: Any, fault: str) -> None:
    path = lines(tmp_path / "chat.jsonl", {"messages": TURNS}, row)
    faults, sound = scan_conversations(path)
    assert sound == 1
    assert [f.startswith(f"{path}:2: {fault}") for f in faults] == [True], faults
    with pytest.raises(DataError):
        read_conversations(path)
