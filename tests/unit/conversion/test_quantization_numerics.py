"""Each format against numbers worked out by hand and against another implementation."""

import math

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_by_compressed_tensors
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from conversion.quantization.codec import codec_for
from conversion.quantization.formats import QuantizationError
from conversion.quantization.fp8 import dequantize_fp8, quantize_fp8
from conversion.quantization.int4 import dequantize_int4, fake_quantize_int4, quantize_int4
from conversion.quantization.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from conversion.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4

FP32, BF16 = torch.float32, torch.bfloat16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, scale: float = 0.02) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def int4_by_compressed_tensors(packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=int(shape[1]) // scale.shape[1])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"]


# --- FP8


def test_fp8_by_hand() -> None:
    """One block with absmax 448, so scale 1: e4m3 has 3 mantissa bits, ties go to the even one."""
    given = [448.0, -448.0, 1.0, 17.0, 19.0, 17.1, 0.0009, 0.0011, 2.0**-9, -0.1]
    e4m3 = [448.0, -448.0, 1.0, 16.0, 20.0, 18.0, 0.0, 2.0**-9, 2.0**-9, -0.1015625]
    q, scale_inv = quantize_fp8(torch.tensor([given]))
    assert q.dtype == torch.float8_e4m3fn and scale_inv.dtype == FP32
    assert scale_inv.tolist() == [[1.0]]
    assert dequantize_fp8(q, scale_inv, FP32).tolist() == [e4m3]


def test_fp8_blocks_are_squares_with_ragged_edges() -> None:
    weight = torch.zeros(130, 200)
    weight[0, 0], weight[0, 128], weight[129, 127], weight[129, 199] = 448.0, 896.0, 224.0, -112.0
    q, scale_inv = quantize_fp8(weight)
    assert q.shape == (130, 200) and q.is_contiguous()
    assert scale_inv.tolist() == [[1.0, 2.0], [0.5, 0.25]]
    assert torch.equal(dequantize_fp8(q, scale_inv, FP32), weight)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_fp8_error_is_half_a_step(dtype: torch.dtype) -> None:
    weight = normal(300, 257, dtype=dtype)
    restored = dequantize_fp8(*quantize_fp8(weight), FP32)
    error = (restored - weight.float()).abs()
    _, scale_inv = quantize_fp8(weight)
    step = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :257]
    assert (error <= weight.float().abs() / 16 * 1.0001 + step * 2.0**-10).all()


def test_fp8_is_dequantized_as_by_transformers() -> None:
    q, scale_inv = quantize_fp8(normal(256, 384))
    theirs = Fp8Dequantize(hf_quantizer=None)
    for dtype in (FP32, BF16):
        assert torch.equal(dequantize_fp8(q, scale_inv, dtype), theirs._dequantize_one(q, scale_inv, dtype))


def test_fp8_is_stable_through_bf16() -> None:
    """What a bf16 trainer holds of an FP8 checkpoint rounds to the same elements again."""
    q, scale_inv = quantize_fp8(normal(256, 256, dtype=FP32))
    again, scale_again = quantize_fp8(dequantize_fp8(q, scale_inv, BF16))
    assert torch.equal(again.float(), q.float())
    assert torch.allclose(scale_again, scale_inv, rtol=2.0**-8)


# --- zero blocks, subnormals, non-finite input


def test_zero_blocks_and_a_single_one() -> None:
    weight = torch.zeros(256, 256)
    weight[3, 5] = 1.0
    q, scale_inv = quantize_fp8(weight)
    restored = dequantize_fp8(q, scale_inv, FP32)
    assert scale_inv[0, 0] == pytest.approx(1 / 448, rel=1e-6) and scale_inv.flatten().tolist()[1:] == [1.0] * 3
    assert restored[3, 5] == pytest.approx(1.0, rel=1e-6)
    restored[3, 5] = 0
    assert torch.equal(restored, torch.zeros(256, 256))


@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-38, 3e38])
def test_extreme_values_stay_finite(format: str, value: float) -> None:
    codec = codec_for(format, 32)
    assert codec is not None
    weight = torch.zeros(128, 256)
    weight[:, :100] = value
    weight[1, :100] = -value
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    stored = dict(codec.encode(name, weight))
    assert all(tensor.float().isfinite().all() for tensor in stored.values())
    restored = codec.decode(name, stored, FP32)
    assert restored.isfinite().all() and torch.equal(restored[:, 128:], torch.zeros(128, 128))
    if value in (0.0, 1e-45):
        assert restored.abs().max() <= value
    if value >= 1e-38:
        assert torch.allclose(restored, weight, rtol=0.01)


@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_named(format: str, value: float) -> None:
    codec = codec_for(format, 32)
    assert codec is not None
    weight = torch.ones(64, 64)
    weight[60, 60] = value
    with pytest.raises(QuantizationError, match=r"model\.layers\.7\.mlp\.experts\.3\.down_proj\.weight .* NaN or inf"):
        codec.encode("model.layers.7.mlp.experts.3.down_proj.weight", weight)


# --- INT4


def test_int4_training_grid_is_the_shipped_grid() -> None:
    """1/7 rounded to bf16 is 0.142578125, seven times that 0.998046875."""
    weight = torch.tensor([[1.0, -1.0, 0.0, 0.5]])
    packed, scale, shape = quantize_int4(weight, 4)
    assert scale.dtype == BF16 and scale.tolist() == [[0.142578125]]
    assert packed.tolist() == [[15 | 1 << 4 | 8 << 8 | 12 << 12]] and packed.dtype == torch.int32
    assert shape.tolist() == [1, 4]
    shipped = dequantize_int4(packed, scale, shape, FP32)
    assert shipped.tolist() == [[0.998046875, -0.998046875, 0.0, 4 * 0.142578125]]
    assert torch.equal(fake_quantize_int4(weight, 4), shipped)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_int4_grids_agree_bit_for_bit(dtype: torch.dtype, group_size: int) -> None:
    weight = normal(48, 256, dtype=dtype)
    seen_in_training = fake_quantize_int4(weight, group_size)
    assert seen_in_training.dtype == dtype
    assert torch.equal(seen_in_training, dequantize_int4(*quantize_int4(weight, group_size), dtype))
    again = fake_quantize_int4(seen_in_training.float(), group_size)
    assert (again - seen_in_training.float()).abs().max() <= weight.float().abs().max() / 100


def test_int4_gradient_is_straight_through() -> None:
    weight = normal(4, 64, dtype=FP32).requires_grad_()
    factor = normal(4, 64, seed=1, dtype=FP32, scale=1.0)
    (fake_quantize_int4(weight, 32) * factor).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, factor)


@pytest.mark.parametrize(("width", "group_size"), [(256, 32), (256, 128), (96, 96), (20, 20), (4, 4)])
def test_int4_is_what_compressed_tensors_packs_and_unpacks(width: int, group_size: int) -> None:
    weight = normal(24, width)
    packed, scale, shape = quantize_int4(weight, group_size)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size)
    theirs = quantize_by_compressed_tensors(weight.float(), scale.float(), None, args, dtype=torch.int8)
    assert torch.equal(packed, pack_to_int32(theirs, 4))
    restored = int4_by_compressed_tensors(packed, scale, shape)
    assert restored.dtype == BF16 and torch.equal(dequantize_int4(packed, scale, shape, BF16), restored)


def test_int4_error_is_half_a_step() -> None:
    weight = normal(32, 256)
    packed, scale, shape = quantize_int4(weight, 64)
    error = (dequantize_int4(packed, scale, shape, FP32) - weight.float()).abs()
    # Half a step, and at the largest value what rounding the scale to bf16 takes from 7 steps.
    assert (error.unflatten(1, (-1, 64)) <= scale.float()[..., None] * (0.5 + 7 * 2.0**-8)).all()


@pytest.mark.parametrize(("format", "group_size"), [("int4", 128), ("mxfp8", 32), ("nvfp4", 16)])
def test_groups_must_divide_the_width(format: str, group_size: int) -> None:
    codec = codec_for(format, group_size)
    assert codec is not None
    option = "quantize.group_size" if format == "int4" else "quantize.format"
    with pytest.raises(QuantizationError) as caught:
        codec.encode("model.layers.0.mlp.experts.0.down_proj.weight", torch.ones(8, 200 + 8 * (format == "mxfp8") + 1))
    for word in ("model.layers.0.mlp.experts.0.down_proj.weight", "input width 2", f"group size {group_size}", option):
        assert word in str(caught.value)
    with pytest.raises(QuantizationError, match=r"quantize\.group_size"):
        fake_quantize_int4(torch.ones(8, 200), 128)


# --- MXFP8


@pytest.mark.parametrize(
    ("absmax", "byte"), [(448.0, 127), (448.5, 128), (896.0, 128), (1.0, 119), (0.875, 118), (0.0, 127), (2.0**-140, 0)]
)
def test_mxfp8_scale_is_the_least_power_of_two(absmax: float, byte: int) -> None:
    """absmax / 448 rounded up to a power of two: 1 / 448 = 2 ** -8.8, so 2 ** -8 = byte 119."""
    weight = torch.full((1, 32), absmax)
    q, scale = quantize_mxfp8(weight)
    assert scale.dtype == torch.uint8 and scale.tolist() == [[byte]]
    restored = dequantize_mxfp8(q, scale, FP32)
    assert torch.allclose(restored, weight, rtol=1 / 16, atol=2.0**-136)


def test_mxfp8_against_compressed_tensors_scales() -> None:
    weight = normal(16, 128)
    q, scale = quantize_mxfp8(weight)
    values = decompress_mx_scale(scale).float().repeat_interleave(32, 1)
    assert torch.equal(dequantize_mxfp8(q, scale, FP32), q.float() * values)
    assert (
        (dequantize_mxfp8(q, scale, FP32) - weight.float()).abs() <= weight.float().abs() / 16 + values / 1024
    ).all()
    stored_as_e8m0 = scale.view(torch.float8_e8m0fnu)
    assert torch.equal(dequantize_mxfp8(q, stored_as_e8m0, FP32), dequantize_mxfp8(q, scale, FP32))


# --- NVFP4


def test_nvfp4_by_hand() -> None:
    """Tensor scale 1 (absmax 2688 = 448 x 6); ties go to the even code."""
    first = [2688.0] + [0.0] * 15  # scale 448
    ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.26]  # scale 1
    rounded = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, 0.5]
    packed, scale, tensor_scale = quantize_nvfp4(torch.tensor([first + ties]))
    assert (packed.dtype, scale.dtype, tensor_scale.dtype) == (torch.uint8, torch.float8_e4m3fn, FP32)
    assert tensor_scale == 1.0 and tensor_scale.shape == () and scale.float().tolist() == [[448.0, 1.0]]
    restored = dequantize_nvfp4(packed, scale, tensor_scale, FP32)
    assert restored.tolist() == [first + rounded]
    assert packed[0, 8:11].tolist() == [0x07, 0x22, 0x44]


def test_nvfp4_codes_are_those_of_compressed_tensors() -> None:
    weight = normal(32, 256)
    packed, scale, tensor_scale = quantize_nvfp4(weight)
    values = unpack_fp4_from_uint8(packed, 32, 256, FP32)
    factor = (scale.float() * tensor_scale).repeat_interleave(16, 1)
    assert torch.equal(dequantize_nvfp4(packed, scale, tensor_scale, FP32), values * factor)
    assert torch.equal(pack_fp4_to_uint8(values), packed)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    theirs = quantize_by_compressed_tensors(
        weight.float(), scale.float(), None, args, global_scale=1 / tensor_scale, dtype=FP32
    )
    assert (theirs != values).float().mean() < 1e-3  # they divide by a reciprocal, which moves a few ties


def test_nvfp4_gate_and_up_share_the_tensor_scale() -> None:
    gate, up = normal(32, 64), normal(32, 64, seed=1, scale=0.5)
    codec = codec_for("nvfp4", 0)
    assert codec is not None
    names = [f"model.layers.1.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert [codec.shares_scale_with(name) for name in names] == [names[1], names[0], None]
    scales = [
        dict(codec.encode(name, weight, fused))[name.removesuffix("weight") + "weight_scale_2"]
        for name, weight, fused in [(names[0], gate, up), (names[1], up, gate)]
    ]
    assert scales[0] == scales[1] == up.float().abs().max() / (448 * 6)
    with pytest.raises(QuantizationError, match="shares its scale with"):
        codec.encode(names[0], gate)
