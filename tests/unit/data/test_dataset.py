import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conversion.character_tokenizer import write_character_tokenizer
from miles_core.config.data import DataConfig, TaskConfig
from miles_core.config.model import ModelConfig, RandomModelConfig
from miles_core.config.run import RunConfig
from miles_core.data.conversations import tokenize_conversations
from miles_core.data.dataset import load_prompts, tokenize_rows
from miles_core.data.rows import DataError, Row, read_rows, scan_prompts
from miles_core.data.tokenization import Tokenizer, load_tokenizer

GOOD = {"input": "1+1=", "label": "2"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder, 64)
    return load_tokenizer(folder)


def prompt_file(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def data(path: Path | None = None, **options: Any) -> DataConfig:
    return DataConfig(prompts=str(path or "prompts.jsonl"), **options)


@pytest.mark.parametrize(
    ("line", "options", "fault"),
    [
        (b'{"input": "x", ', {}, "no valid JSON: Expecting property name enclosed in double quotes at column"),
        (b'{"input": "\xff"}', {}, "no valid UTF-8: invalid start byte at byte 12"),
        ([1], {}, "a JSON object is required, found list"),
        ({"prompt": "x", "label": 1}, {}, "no field 'input' (data.input_key), found ['label', 'prompt']"),
        ({"input": "x"}, {}, "no field 'label' (data.label_key), found ['input']"),
        ({**GOOD, "input": ""}, {}, "'input' (data.input_key) is empty"),
        ({**GOOD, "input": 7}, {}, "must be a string or a list of messages with a role each, found '7'"),
        ({**GOOD, "input": [{"content": "x"}]}, {}, "must be a string or a list of messages"),
        ({**GOOD, "input": []}, {}, "must be a string or a list of messages"),
        ({**GOOD, "input": [{"role": "user"}]}, {}, "holds messages: set data.apply_chat_template=true"),
        ({**GOOD, "metadata": [1]}, {}, "metadata must be an object, found list"),
        ({**GOOD, "tools": [{}]}, {}, "tools must be a list of objects, and data.apply_chat_template true"),
        ({**GOOD, "tools": "f"}, {"apply_chat_template": True}, "tools must be a list of objects"),
    ],
)
def test_each_fault_of_a_row_names_its_line(tmp_path: Path, line: Any, options: dict[str, Any], fault: str) -> None:
    path = prompt_file(tmp_path, GOOD, b"", line, GOOD)
    with pytest.raises(DataError) as error:
        read_rows(path, data(path, **options))
    assert len(error.value.faults) == 1
    assert error.value.faults[0].startswith(f"{path}:3: ")
    assert fault in error.value.faults[0]
    assert scan_prompts(path, data(path, **options)) == (error.value.faults, 2)


def test_all_faults_come_at_once_and_a_long_list_is_cut(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, *[b"{"] * 30)
    with pytest.raises(DataError) as error:
        read_rows(path, data(path))
    assert [fault.split(": ")[0] for fault in error.value.faults] == [f"{path}:{n}" for n in range(1, 31)]
    assert str(error.value).splitlines()[-1] == "... and 10 more faults"


@pytest.mark.parametrize("content", [(), (b"", b"  ")], ids=["no byte", "blank lines"])
def test_an_empty_file_is_a_fault(tmp_path: Path, content: tuple[bytes, ...]) -> None:
    path = prompt_file(tmp_path, *content)
    faults, count = scan_prompts(path, data(path))
    assert (faults, count) == ([f"{path} holds no rows: one JSON object a line is required"], 0)


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    assert (
        "is no file (data.prompts, data.eval_prompts, data.conversations)"
        in scan_prompts(tmp_path / "x.jsonl", data())[0][0]
    )


def test_rows_are_read_whole(tmp_path: Path) -> None:
    messages, tools = [{"role": "user", "content": "x"}], [{"name": "f"}]
    path = prompt_file(tmp_path, {"q": messages, "a": 4, "metadata": {"level": 2}, "tools": tools})
    options = data(path, input_key="q", label_key="a", apply_chat_template=True)
    assert read_rows(path, options) == [Row(f"{path}:1", messages, 4, {"level": 2}, tools)]
    assert read_rows(path, options.model_copy(update={"label_key": None}))[0].label is None


def test_prompts_are_tokenized_and_every_row_is_accounted_for(tmp_path: Path, tokenizer: Tokenizer) -> None:
    inputs = ["12=", "12345678=", "123=", "123456789="]
    path = prompt_file(tmp_path, *({"input": text, "label": text[0], "metadata": {"n": len(text)}} for text in inputs))
    loaded = tokenize_rows(read_rows(path, data(path)), tokenizer, data(path, max_prompt_length=4))
    assert loaded.account == {"in": 4, "used": 2, "dropped": {"too_long": 2}}
    assert [(p.index, p.text, p.label, p.metadata) for p in loaded.prompts] == [
        (0, "12=", "1", {"n": 3}),
        (2, "123=", "1", {"n": 4}),
    ]
    assert all(p.token_ids.dtype == np.int32 for p in loaded.prompts)
    assert tokenizer.decode(loaded.prompts[1].token_ids) == "123="


def test_nothing_left_names_limit_and_rows(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"no prompt is left: 2 of 2 are longer than data\.max_prompt_length 3"):
        tokenize_rows([Row("a", "1234"), Row("b", "12345")], tokenizer, data(max_prompt_length=3))


def test_rows_with_lost_characters_are_all_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError) as error:
        tokenize_rows([Row("f:1", "A="), Row("f:2", "1="), Row("f:3", "2~")], tokenizer, data())
    assert [fault.split(" at")[0] for fault in error.value.faults] == [
        "f:1: character 'A' (U+0041)",
        "f:3: character '~' (U+007E)",
    ]


@pytest.mark.parametrize(("split", "size"), [("train", 3), ("eval", 2)])
def test_load_prompts_takes_file_or_task_by_split(tmp_path: Path, tokenizer: Tokenizer, split: Any, size: int) -> None:
    for name, count in (("train.jsonl", 3), ("eval.jsonl", 2)):
        (tmp_path / name).write_text("\n".join([json.dumps(GOOD)] * count))
    from_file = data(tmp_path / "train.jsonl", eval_prompts=str(tmp_path / "eval.jsonl"))
    generated = DataConfig(task=TaskConfig(train_size=3, eval_size=2))
    model = ModelConfig(random=RandomModelConfig())
    for source, reward in ((from_file, {"type": "exact_match"}), (generated, {})):
        config = RunConfig.model_validate({"model": model, "data": source, "reward": reward})
        assert load_prompts(config, tokenizer, split).account["used"] == size


SFT_ROWS = [
    Row(f"f:{i}", [{"role": "user", "content": "12345678 9"}, {"role": "assistant", "content": "42"}]) for i in range(4)
]  # 12 tokens of prompt (two of them role tokens), then "4", "2" and <eos>


def test_conversations_without_anything_to_learn_stop_the_run(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="none of 4 rows has a token of the assistant within the limit of 10 tokens"):
        tokenize_conversations(SFT_ROWS, tokenizer, max_length=10)


def test_conversations_are_cut_at_the_limit(tokenizer: Tokenizer) -> None:
    loaded = tokenize_conversations(SFT_ROWS, tokenizer, max_length=13)
    assert loaded.account == {"in": 4, "used": 4, "truncated": 4, "dropped": {"nothing_to_learn": 0}}
    assert [int(c.loss_mask.sum()) for c in loaded.conversations] == [1, 1, 1, 1]
    assert {len(c.token_ids) for c in loaded.conversations} == {13}


def test_conversations_with_nothing_to_learn_are_counted(tokenizer: Tokenizer) -> None:
    short = Row("f:4", [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
    loaded = tokenize_conversations([*SFT_ROWS, short], tokenizer, max_length=10)
    assert loaded.account == {"in": 5, "used": 1, "truncated": 0, "dropped": {"nothing_to_learn": 4}}
    assert loaded.conversations[0].index == 4


def test_a_string_is_no_conversation(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="f:1: supervised fine-tuning needs a list of messages"):
        tokenize_conversations([Row("f:1", "12")], tokenizer, max_length=10)
