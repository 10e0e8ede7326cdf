"""The process behind `SymbolicReward`: a JSON question a line on stdin, a JSON verdict a line on stdout."""

import json
import sys

from math_verify import parse, verify


def judge(label: str, answer: str) -> dict[str, object]:
    """{"equal", "found"}, or {"error"} for a label that is no formula."""
    gold = parse(f"\\boxed{{{label}}}", raise_on_error=False)
    if not gold:
        return {"error": f"label {label!r} is no formula that math-verify can read"}
    found = parse(answer, raise_on_error=False)
    return {"equal": bool(found) and verify(gold, found), "found": bool(found)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(judge(**json.loads(line))), flush=True)
