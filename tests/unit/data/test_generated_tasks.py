from typing import Any

import numpy as np
import pytest

from miles_core.config.data import TaskConfig
from miles_core.data.rows import DataError, Row
from miles_core.data.tasks import build_task
from miles_core.data.tasks.reasoning_gym import extract_answer
from miles_core.types import Prompt, Score

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = [
    TaskConfig(name="sort_digits", train_size=800, eval_size=150),
    TaskConfig(name="sort_digits", params={"num_digits": 1}, train_size=6, eval_size=4),
    TaskConfig(name="sort_digits", params={"num_digits": 18}, train_size=50, eval_size=50),
    TaskConfig(name="reasoning_gym/chain_sum", params=SUMS, train_size=100, eval_size=50),
    TaskConfig(name="reasoning_gym/basic_arithmetic", train_size=20, eval_size=10),
]


def as_prompt(row: Row) -> Prompt:
    return Prompt(0, str(row.prompt), np.zeros(0, np.int32), row.label, row.metadata)


@pytest.mark.parametrize("config", TASKS, ids=lambda c: f"{c.name} {c.params}")
def test_splits_are_disjoint_repeatable_and_of_the_size_asked_for(config: TaskConfig) -> None:
    task = build_task(config)
    train, held_out = task.rows("train"), task.rows("eval")
    assert (len(train), len(held_out)) == (config.train_size, config.eval_size)
    texts = [row.prompt for row in (*train, *held_out)]
    assert len(set(texts)) == len(texts)
    assert build_task(config).rows("train") == train
    other_seed = build_task(config.model_copy(update={"seed": 1}))
    assert other_seed.rows("train") != train
    fewer = build_task(config.model_copy(update={"train_size": 2}))
    assert fewer.rows("eval") == held_out  # the held-out set does not move with the training set
    assert fewer.rows("train") == [*train[:2]]


@pytest.mark.parametrize("config", TASKS, ids=lambda c: f"{c.name} {c.params}")
def test_the_label_itself_scores_one_and_nothing_scores_none(config: TaskConfig) -> None:
    task = build_task(config)
    for row in task.rows("eval")[:20]:
        assert task.score(as_prompt(row), str(row.label)) == Score(1.0)
        assert task.score(as_prompt(row), "  \n") == Score(0.0, answer_found=False)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (
            {"train_size": 990, "eval_size": 11},
            "data.task.train_size 990 + data.task.eval_size 11 = 1001 prompts, but 3 digits make 1000: lower a size or "
            "raise data.task.params.num_digits",
        ),
        ({"params": {"num_digits": 0}}, "data.task.params.num_digits = 0: must be at least 1"),
        (
            {"params": {"num_digit": 3}},
            "unknown option data.task.params.num_digit; did you mean data.task.params.num_digits?",
        ),
        ({"name": "sort_digit"}, "must be one of sort_digits, reasoning_gym/NAME; did you mean sort_digits?"),
        ({"name": "reasoning_gym/chain_sums"}, "has no data set 'chain_sums'; did you mean chain_sum?"),
        (
            {"name": "reasoning_gym/chain_sum", "params": {"min_term": 1}},
            "unknown option data.task.params.min_term; did you mean min_terms?",
        ),
        (
            {"name": "reasoning_gym/chain_sum", "params": {"min_terms": 3, "max_terms": 2}},
            "of reasoning_gym/chain_sum: max_terms must be >= min_terms",
        ),
        (
            {"name": "reasoning_gym/chain_sum", "params": SUMS, "train_size": 300, "eval_size": 10},
            "= 310 prompts, but reasoning_gym/chain_sum",
        ),
    ],
)
def test_impossible_tasks_are_refused_with_the_option(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataError) as error:
        build_task(TaskConfig(**config)).rows("train")
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("label", "response", "points"),
    [
        ("123", "123", 4),
        ("123", " 123\n", 4),
        ("123", "132", 1.5 + 0.5 + 1),
        ("123", "312", 1.5 + 0 + 1),
        ("123", "12", 1 + 1 + 2 / 3),
        ("123", "1", 0.5 + 0.5 + 1 / 3),
        ("123", "1234", 1.5 + 1.5 + 2 / 3),
        ("123", "123456", 1.5 + 1.5 + 0),
        ("123", "123456789", 1.5 + 1.5 + 0),
        ("123", "xyz123", 1.5 + 0 + 0),
        ("123", "xyz", 1),
        ("122", "222", 1 + 1 + 1),  # a digit counts as often as the answer has it
        ("122", "111", 0.5 + 0.5 + 1),
        ("123", "", 0),
    ],
)
def test_sorted_digits_are_graded_by_presence_place_and_length(label: str, response: str, points: float) -> None:
    prompt = Prompt(0, "", np.zeros(0, np.int32), label)
    score = build_task(TaskConfig(name="sort_digits")).score(prompt, response)
    assert score.value == pytest.approx(points / 4)
    assert score.answer_found == bool(response)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42", "42"),
        ("thinking\nof 41\n\n 42 \n", "42"),
        ("<answer>42</answer>", "42"),
        ("<answer>41</answer> no: <answer>\n42\n</answer>" + " and so on" * 40, "42"),
        ("<answer>4\n2</answer>\n7", "4\n2"),
        ("7\n<answer>42", "<answer>42"),
        ("7 <answer> </answer>", None),
        (" \n ", None),
        ("", None),
    ],
)
def test_answer_is_the_last_tagged_text_else_the_last_line(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def test_a_wrong_answer_is_told_from_no_answer() -> None:
    task = build_task(TASKS[3])
    prompt = as_prompt(task.rows("train")[0])
    assert task.score(prompt, "<answer>x</answer>") == Score(0.0)
    assert task.score(prompt, "<answer></answer>") == Score(0.0, answer_found=False)
    assert task.score(prompt, f"so\n<answer>{prompt.label}</answer>" + "." * 400) == Score(1.0)
