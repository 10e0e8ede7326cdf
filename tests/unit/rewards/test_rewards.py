import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.config.run import RunConfig
from miles_core.rewards import REWARDS, build_reward
from miles_core.rewards.exact_match import exact_match
from miles_core.rewards.function import find_module, load_function
from miles_core.rewards.symbolic import SymbolicReward, last_boxed
from miles_core.types import Prompt, Score


def prompt(label: Any) -> Prompt:
    return Prompt(0, "6*7=", np.zeros(1, np.int32), label, {"level": 3})


@pytest.fixture(scope="module")
def symbolic() -> Iterator[dict[str, SymbolicReward]]:
    rewards = {"boxed": SymbolicReward("boxed"), "anywhere": SymbolicReward("anywhere")}
    yield rewards
    for reward in rewards.values():
        reward.close()


@pytest.mark.parametrize(
    ("label", "response", "score"),
    [
        ("42", " 42\n", Score(1.0)),
        (42, "42", Score(1.0)),
        ("42", "42.", Score(0.0)),
        ("42", "137", Score(0.0)),
        ("42", " \n", Score(0.0, answer_found=False)),
    ],
)
def test_exact_match(label: Any, response: str, score: Score) -> None:
    assert exact_match(prompt(label), response) == score


BOXED = [
    ("42", "so \\boxed{42}", Score(1.0)),
    ("42", "so \\boxed{42}" + " and more" * 50, Score(1.0)),  # what follows does not matter, however long
    ("137", "first \\boxed{1}, then \\boxed{137}.", Score(1.0)),  # the last one, and all of it
    ("1", "first \\boxed{1}, then \\boxed{137}.", Score(0.0)),
    ("\\frac{1}{2}", "\\boxed{0.5}", Score(1.0)),
    ("1/2", "\\boxed{\\frac{2}{4}}", Score(1.0)),
    ("(x+1)^2", "\\boxed{x^2+2x+1}", Score(1.0)),
    ("42", "\\boxed{43}", Score(0.0)),
]


@pytest.mark.parametrize("search", ["boxed", "anywhere"])
@pytest.mark.parametrize(("label", "response", "score"), BOXED)
def test_boxed_answers(
    symbolic: dict[str, SymbolicReward], search: str, label: str, response: str, score: Score
) -> None:
    assert symbolic[search](prompt(label), response) == score


@pytest.mark.parametrize(
    ("search", "response", "score"),
    [
        ("boxed", "the answer is 42", Score(0.0, answer_found=False)),
        ("boxed", "cut off: \\boxed{42", Score(0.0, answer_found=False)),
        ("boxed", "\\boxed{ }", Score(0.0, answer_found=False)),
        ("anywhere", "The final answer is $42$. I hope it is correct", Score(1.0)),
        ("anywhere", "6 * 7 = 42", Score(1.0)),
        ("anywhere", "I do not know", Score(0.0, answer_found=False)),
        ("anywhere", "", Score(0.0, answer_found=False)),
    ],
)
def test_answers_without_a_box(symbolic: dict[str, SymbolicReward], search: str, response: str, score: Score) -> None:
    assert symbolic[search](prompt("42"), response) == score


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{\\frac{1}{2}} or \\boxed{{3}", "\\frac{1}{2}"),
        ("\\boxed{a}\\boxed{}", ""),
        ("\\boxed 42", None),
        ("", None),
    ],
)
def test_last_boxed_has_balanced_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_symbolic_reward_works_in_a_thread_and_goes_on_after_a_runaway_expression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward = SymbolicReward("boxed")
    scores: list[Score] = []

    def score() -> None:
        scores.append(reward(prompt("42"), "\\boxed{42}"))
        monkeypatch.setattr("miles_core.rewards.symbolic._TIME_LIMIT_S", 0.0)
        scores.append(reward(prompt("42"), "\\boxed{41+1}"))
        monkeypatch.setattr("miles_core.rewards.symbolic._TIME_LIMIT_S", 60.0)
        scores.append(reward(prompt("42"), "\\boxed{41+1}"))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    reward.close()
    assert scores == [Score(1.0), Score(0.0), Score(1.0)]


def test_a_label_that_is_no_formula_is_an_error(symbolic: dict[str, SymbolicReward]) -> None:
    with pytest.raises(ValueError, match="label '' is no formula"):
        symbolic["boxed"](prompt(""), "\\boxed{1}")


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "length.py").write_text(
        "def score(prompt, response, label, metadata):\n"
        "    return len(prompt) + len(response) + label + metadata['level']\n"
        "LIMIT = 3\n"
    )
    (package / "broken.py").write_text("raise RuntimeError('ran on import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith("my_rewards")]:
        del sys.modules[name]


@pytest.mark.usefixtures("user_module")
def test_a_function_of_the_users_own_gets_text_label_and_metadata() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"task": {}},
            "reward": {"type": "function", "function": "my_rewards.length:score"},
        }
    )
    assert build_reward(config)(prompt(10), "12345") == Score(4 + 5 + 10 + 3)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("my_rewards.length", "must be written package.module:name"),
        ("my_rewards.length:", "must be written package.module:name"),
        ("my-rewards:score", "must be written package.module:name"),
        ("my_rewards.missing:score", "module my_rewards.missing can not be imported"),
        ("my_rewards.length:scores", "module my_rewards.length has no scores"),
        ("my_rewards.length:LIMIT", "is a int, a function is required"),
    ],
)
def test_a_wrong_function_path_is_an_error(path: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r"reward\.function") as error:
        load_function(path)
    assert fault in str(error.value)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("my_rewards.broken", True),
        ("my_rewards.missing", False),
        ("my_rewards.length.x", False),
        ("no_such_package.x", False),
        ("miles_core.rewards", True),
        ("math", True),
    ],
)
def test_modules_are_found_without_being_run(name: str, there: bool) -> None:
    assert find_module(name) is there
    assert "my_rewards" not in sys.modules


def test_there_is_a_reward_for_every_type() -> None:
    field = RunConfig.model_fields["reward"].annotation.model_fields["type"]  # type: ignore[union-attr]
    assert set(REWARDS) == set(field.annotation.__args__)
