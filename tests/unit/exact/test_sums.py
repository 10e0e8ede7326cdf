"""Sums that do not depend on their order: against Python's integers, and against themselves in other company."""

from fractions import Fraction

import pytest
import torch

from miles_core.exact.sums import WholeRows, bits_of_factors, product, sum_of_fractions, sum_of_squares


@pytest.mark.parametrize("terms", [1, 2, 3, 64, 100, 4096, 5000, 131072])
def test_no_sum_of_products_can_pass_2_to_the_53(terms: int) -> None:
    left, right = bits_of_factors(terms)
    assert terms * 2 ** (left + right) <= 2**53
    assert terms * 2 ** (left + right) * 4 > 2**53  # and no bit is given away


def test_a_row_is_rounded_to_multiples_of_its_own_unit() -> None:
    """Largest 3: the power of two below is 2, so with 4 bits the unit is 2 * 2^-3 = 0.25, and 0.1 becomes 0."""
    rows = WholeRows.of(torch.tensor([[3.0, 0.1, -0.125, 0.4], [0.0, 0.0, 0.0, 0.0]]), 4)
    assert rows.unit[0].item() == 0.25
    assert rows.numbers.tolist() == [[12, 0, 0, 2], [0, 0, 0, 0]]  # -0.5 and 1.6 units; halves go to even


@pytest.mark.parametrize("scale", [1e-38, 1e-3, 1.0, 1e30])
def test_products_are_exact(scale: float) -> None:
    """The result is what integers of any length give, for the rounded rows."""
    torch.manual_seed(0)
    left, right = torch.randn(3, 500) * scale, torch.randn(4, 500)
    a, b = (WholeRows.of(x, bits) for x, bits in zip((left, right), bits_of_factors(500), strict=True))
    found = product(a, b)
    for i in range(3):
        for j in range(4):
            exact = sum(int(x) * int(y) for x, y in zip(a.numbers[i].tolist(), b.numbers[j].tolist(), strict=True))
            unit = Fraction(a.unit[i].item()) * Fraction(b.unit[j].item())
            assert Fraction(found[i, j].item()) == exact * unit


def test_the_worst_rows_do_not_overflow() -> None:
    largest = torch.full((1, 4096), 1.9999999)
    a, b = (WholeRows.of(largest, bits) for bits in bits_of_factors(4096))
    assert int(product(a, b).item() / (a.unit * b.unit).item()) == sum(
        int(x) * int(y) for x, y in zip(a.numbers[0].tolist(), b.numbers[0].tolist(), strict=True)
    )


def test_products_depend_neither_on_order_nor_on_company() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(300, 576), torch.randn(192, 576)
    bits = bits_of_factors(576)
    b = WholeRows.of(right, bits[1])
    whole = product(WholeRows.of(left, bits[0]), b)
    for rows in (1, 2, 7, 33, 299):
        assert product(WholeRows.of(left[:rows], bits[0]), b).equal(whole[:rows])
    order = torch.randperm(576)
    assert product(WholeRows.of(left[:, order], bits[0]), WholeRows.of(right[:, order], bits[1])).equal(whole)
    plain = torch.cat([left[:n] @ right.T for n in (1, 300)])
    assert not plain[0].equal(plain[1])  # or there is nothing to it


def test_products_are_as_close_to_the_truth_as_those_of_float32() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(64, 1024), torch.randn(64, 1024)
    truth = left.double() @ right.double().T
    found = product(*(WholeRows.of(x, bits) for x, bits in zip((left, right), bits_of_factors(1024), strict=True)))
    assert (found - truth).abs().max() < 2e-4  # products of size 1, 1024 of them, to 21 bits of rows up to 4


def test_sums_of_squares_and_of_fractions() -> None:
    assert sum_of_squares(torch.tensor([[3.0, 4.0]])).item() == 25
    x = torch.rand(5, 101)
    found = sum_of_fractions(x, 512)
    assert sum_of_fractions(torch.cat([x, torch.zeros(5, 60)], 1), 512).equal(found)
    assert sum_of_fractions(x.flip(1), 512).equal(found)
    torch.testing.assert_close(found, x.double().sum(1, keepdim=True), atol=1e-10, rtol=0)
