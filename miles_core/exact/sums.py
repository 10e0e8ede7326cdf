"""Sums that come out the same, bit for bit, in whatever order and whatever company they are computed.

Rounding makes floating-point addition depend on its order, and matrix products choose the order by the shape of the
whole batch: the same token gives other last digits alone than among others. Whole numbers add up without rounding as
long as every sum stays below 2^53, the largest that float64 counts without gaps. So each row is rounded, once and by
itself, to whole multiples of a power of two; their products are added in float64, without any error; and the result is
rounded back once. It depends on its own two rows alone: not on the batch, on padding, on threads, or on the library
that multiplies. (The idea of Ozaki et al., "Error-free transformations of matrix multiplication", 2012, one slice.)

A row of K numbers keeps about (53 - log2 K) / 2 bits relative to its largest: 23 of float32's 24 at K = 128, 20 at
K = 4096. The sum itself is then exact, so results are about as close to the true ones as float32's own.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_MANTISSA = 53  # bits of float64
_EXPONENT = 0x7FF0_0000_0000_0000
_SMALLEST = 2.0**-126  # float32's smallest normal number: a row below it counts as 0


@dataclass(frozen=True)
class WholeRows:
    """numbers * unit is the rounded tensor."""

    numbers: Tensor  # float64 [..., K], whole
    unit: Tensor  # float64 [..., 1], powers of two

    @classmethod
    def of(cls, x: Tensor, bits: int) -> Self:
        """Each row (last dim) of x to the nearest multiples of its own unit, at most 2^bits of them."""
        largest = x.abs().amax(-1, keepdim=True).double().clamp(min=_SMALLEST)
        below = (largest.view(torch.int64) & _EXPONENT).view(torch.float64)  # the power of two at or below it
        unit = below * 2.0 ** (1 - bits)
        return cls(torch.mul(x, unit.reciprocal()).round_(), unit)


def bits_of_factors(terms: int) -> tuple[int, int]:
    """Bits of either factor so that a sum of `terms` products stays below 2^53: terms * 2^(a + b) <= 2^53."""
    bits = _MANTISSA - math.ceil(math.log2(terms))
    return bits // 2, bits - bits // 2


def product(left: WholeRows, right: WholeRows) -> Tensor:
    """left [..., m, K] times right [..., n, K] transposed: float64 [..., m, n], exact."""
    return (left.numbers @ right.numbers.mT).mul_(left.unit).mul_(right.unit.mT)


def sum_of_squares(x: Tensor) -> Tensor:
    """Of each row, float64 [..., 1]."""
    rows = WholeRows.of(x, bits_of_factors(x.shape[-1])[0])
    return rows.numbers.square().sum(-1, keepdim=True).mul_(rows.unit.square())


def sum_of_fractions(x: Tensor, terms: int) -> Tensor:
    """Of each row of numbers in [0, 1], float64 [..., 1]: exact for multiples of terms * 2^-52.

    `terms` bounds the length of rows everywhere that equal sums are wanted, this row's padding not counted.
    """
    unit = 2.0 ** (math.ceil(math.log2(terms)) + 1 - _MANTISSA)
    return x.double().mul_(1 / unit).round_().sum(-1, keepdim=True).mul_(unit)
