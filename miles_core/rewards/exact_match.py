"""`exact_match`: the whole response is the label."""

from miles_core.types import Prompt, Score


def exact_match(prompt: Prompt, response: str) -> Score:
    """1 if response and label are equal without the white space around them, else 0. A blank response has no answer."""
    answer = response.strip()
    return Score(float(answer == str(prompt.label).strip()), answer_found=bool(answer))
