"""Products in e4m3: rounding by hand, sums and gradients against float64, and values that no format can hold."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from conversion.quantization.fp8 import dequantize_fp8, quantize_fp8
from miles_core.precision.fp8 import Fp8Matrix, multiply
from miles_core.precision.fp8_products import Fp8Products

_E4M3 = sorted({m * 2.0**e for e in range(-9, 6) for m in range(8, 16)} | {m * 2.0**-9 for m in range(8)})
_E4M3 = [v for v in _E4M3 if v <= 448]


def _nearest(x: float) -> float:
    """The e4m3 value nearest to x, ties to the even mantissa, from the format's definition (OCP 8-bit, 2023)."""
    size = min(abs(x), 448.0)
    step = 2.0 ** (max(math.floor(math.log2(size)), -6) - 3) if size else 1.0
    return math.copysign(round(size / step) * step, x)  # Python rounds ties to even


def _reference(x: Tensor, row_block: int) -> Tensor:
    """float64: each block of x rounded on its own, in plain Python."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], row_block):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + row_block, j : j + 128]
            scale = float((block.abs().max() / 448).float()) or 1.0
            quotients = (block / torch.tensor(scale)).tolist()
            values = [[_nearest(v) * scale for v in row] for row in quotients]
            out[i : i + row_block, j : j + 128] = torch.tensor(values, dtype=torch.float64)
    return out


def _random(*shape: int, seed: int, outliers: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if outliers:
        x[0, 0], x[-1, -1] = 3e4, -1e-6
    return x


@pytest.mark.parametrize("row_block", [1, 128])
def test_rounding_is_that_of_the_format(row_block: int) -> None:
    x = _random(130, 200, seed=0, outliers=True)
    found = Fp8Matrix.of_rows(x) if row_block == 1 else Fp8Matrix.of_weight(x)
    torch.testing.assert_close(found.decoded().double(), _reference(x, row_block), rtol=1e-6, atol=0)
    assert set(found.values.float().abs().unique().tolist()) <= set(_E4M3)


def test_an_outlier_costs_its_own_block_alone() -> None:
    x = torch.ones(2, 256)
    x[0, 0] = 448.0 * 2**10  # its block's step is then 2 at the least
    decoded = Fp8Matrix.of_rows(x).decoded()
    assert decoded[0, 0] == x[0, 0]
    assert decoded[0, 1:128].eq(0).all()
    assert decoded[0, 128:].eq(1).all() and decoded[1].eq(1).all()


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(3, 300)
    matrix = Fp8Matrix.of_rows(x)
    assert matrix.scale.eq(1).all() and matrix.decoded().eq(0).all()
    products, weight = Fp8Products(), torch.zeros(5, 300, requires_grad=True)
    products.linear(x, weight).sum().backward()
    assert weight.grad is not None and weight.grad.eq(0).all()
    assert products.take_non_finite() == 0


def test_weights_are_those_of_an_fp8_rollout() -> None:
    weight = _random(150, 260, seed=1, outliers=True)
    assert Fp8Matrix.of_weight(weight).decoded().equal(dequantize_fp8(*quantize_fp8(weight), torch.float32))
    assert Fp8Matrix.of_weight(weight).transposed().decoded().equal(Fp8Matrix.of_weight(weight).decoded().t())


@pytest.mark.parametrize("shape", [(7, 130, 200), (256, 128, 128), (1, 5, 3)])
def test_product_and_gradients_against_float64(shape: tuple[int, int, int]) -> None:
    """Each of the three products has both operands in blocks along what it sums over."""
    m, n, k = shape
    x, weight = _random(m, k, seed=2, outliers=True).requires_grad_(), _random(n, k, seed=3).requires_grad_()
    grad = _random(m, n, seed=4, outliers=True)
    output = Fp8Products().linear(x, weight)
    output.backward(grad)
    x_, w_, g_ = x.detach(), weight.detach(), grad
    expected = (
        (output.detach(), _reference(x_, 1), _reference(w_, 128).t()),
        (x.grad, _reference(g_, 1), _reference(w_, 128)),
        (weight.grad, _reference(g_.t().contiguous(), 1), _reference(x_.t().contiguous(), 1).t()),
    )
    for found, left, right in expected:
        assert found is not None
        scale = (left.abs() @ right.abs()).max()
        torch.testing.assert_close(found.double(), left @ right, rtol=0, atol=1e-6 * float(scale))


def test_experts_are_products_of_their_own_rows() -> None:
    """The second expert has none; its gradient is 0."""
    rows, weight = _random(9, 160, seed=5).requires_grad_(), _random(3 * 40, 160, seed=6).view(3, 40, 160).clone()
    weight.requires_grad_()
    output = Fp8Products().grouped(rows, weight, torch.tensor([4, 4, 9], dtype=torch.int32))
    output.backward(torch.ones_like(output))
    alone = Fp8Products()
    for expert, (start, end) in enumerate(pairwise([0, 4, 4, 9])):
        w = weight.detach()[expert].clone().requires_grad_()
        part = rows.detach()[start:end].clone().requires_grad_()
        expected = alone.linear(part, w)
        expected.sum().backward()
        assert output[start:end].equal(expected)
        assert weight.grad is not None and rows.grad is not None
        assert weight.grad[expert].equal(w.grad)
        assert rows.grad[start:end].equal(part.grad)
    assert weight.grad is not None and weight.grad[1].eq(0).all()


def test_bf16_stays_bf16() -> None:
    x, weight = _random(4, 128, seed=7).bfloat16().requires_grad_(), _random(6, 128, seed=8).bfloat16().requires_grad_()
    output = Fp8Products().linear(x.view(2, 2, 128), weight)
    output.sum().backward()
    assert output.shape == (2, 2, 6)
    assert {output.dtype, x.grad.dtype, weight.grad.dtype} == {torch.bfloat16}  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["activation", "weight", "gradient"])
def test_what_is_not_finite_is_counted_and_never_clipped(value: float, where: str) -> None:
    products = Fp8Products()
    x, weight, grad = _random(3, 256, seed=9), _random(2, 256, seed=10), _random(3, 2, seed=11)
    {"activation": x, "weight": weight, "gradient": grad}[where][1, 1] = value
    x.requires_grad_(), weight.requires_grad_()
    output = products.linear(x, weight)
    output.backward(grad)
    assert products.take_non_finite() == 1
    assert products.take_non_finite() == 0
    assert x.grad is not None and weight.grad is not None
    assert not x.grad.isfinite().all() or not weight.grad.isfinite().all()
    if where == "activation":
        assert output[1].isnan().all() and output[[0, 2]].isfinite().all()
    if where == "weight":
        assert output.isnan().all()


def test_the_largest_numbers_do_not_overflow() -> None:
    x = torch.full((2, 128), torch.finfo(torch.float32).max)
    assert Fp8Matrix.of_rows(x).decoded().isfinite().all()
    tiny = torch.full((2, 128), 1e-44)  # its scale would be 0, or a subnormal of few bits
    assert Fp8Matrix.of_rows(tiny).decoded().isfinite().all()
    assert multiply(Fp8Matrix.of_rows(tiny), Fp8Matrix.of_rows(tiny), torch.float32).isfinite().all()
