"""`math` and `boxed_math`: symbolic equality with the label, by the math-verify library.

Which part of a response is its answer:

- boxed_math: the last `\\boxed{...}`, wherever it stands and whatever follows it.
- math: the last `\\boxed{...}` if there is one, else what math-verify finds in the whole response: what follows
  "final answer is", else the last formula or number.
"""

import atexit
import json
import os
import select
import subprocess
import sys
from typing import Any, Literal

from miles_core.types import Prompt, Score

# math-verify interrupts itself by a signal after 5 s each of parsing and comparing; a loop in C code ignores that.
_TIME_LIMIT_S = 30.0


class SymbolicReward:
    """Scores 1 or 0. An expression that is too hard to compare within the time limit counts as wrong.

    math-verify runs in a process of its own: its time limits need a main thread, and a runaway expression must not take
    the run with it.
    """

    def __init__(self, search: Literal["boxed", "anywhere"]) -> None:
        self._search = search
        self._worker: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def __call__(self, prompt: Prompt, response: str) -> Score:
        answer = last_boxed(response)
        if answer is not None:
            answer = f"\\boxed{{{answer}}}"
        elif self._search == "anywhere":
            answer = response
        if answer is None or not answer.strip():
            return Score(0.0, answer_found=False)
        verdict = self._ask({"label": str(prompt.label), "answer": answer})
        if "error" in verdict:
            raise ValueError(verdict["error"])
        return Score(float(verdict["equal"]), answer_found=verdict["found"])

    def close(self) -> None:
        """Ends the worker process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        if self._worker is None or self._worker.poll() is not None:
            self._worker = _start_worker()
        worker = self._worker
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
        if not select.select([worker.stdout], [], [], _TIME_LIMIT_S)[0]:
            self.close()
            return {"equal": False, "found": True}
        answer = worker.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError(f"the math-verify process ended on {question}")
        return dict(json.loads(answer))


def _start_worker() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "miles_core.rewards.symbolic_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` with balanced braces; None if there is none."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        depth = 0
        begin = start + len("\\boxed{")
        for position in range(begin - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position]
    return None
