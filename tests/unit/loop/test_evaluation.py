from itertools import combinations

import pytest

from miles_core.evaluation import pass_at_k


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 2), (5, 3, 2), (6, 0, 3), (6, 6, 1), (8, 2, 8)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int, correct: int, k: int) -> None:
    draws = list(combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))
