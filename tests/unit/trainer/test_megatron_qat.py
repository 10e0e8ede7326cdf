"""Quantization-aware training: what the trainer sees is what an INT4 engine unpacks, bit for bit."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from ranks import on_ranks, trainer_of
from torch import Tensor
from trainer_models import checkpoint_folder, geometry_of, hf_folder, make_samples, run_config

from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.quantization.checkpoint import quantize_folder, quantized_in_folder
from conversion.quantization.codec import codec_for
from conversion.quantization.formats import FormatSpec, QuantizationError, require_format
from conversion.safetensors_header import read_json
from conversion.safetensors_io import SafetensorsFolder
from conversion.torch_dist_to_hf import torch_dist_to_hf
from miles_core.precision.int4_qat import Int4AwareProducts, stored_dtype
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample
from miles_core.weight_sync.push import encode_weights

_NAME, _COUNT, _GROUP = "glm4-moe-mtp", 6, 8


def _config(name: str, format: str, *, qat: bool = True, **trainer: Any) -> Any:
    trainer = {"qat": qat, "optimizer": {"lr": 1e-2, "clip_grad": 0}, **trainer}
    return run_config(name, samples=_COUNT, trainer=trainer, quantize={"format": format, "group_size": _GROUP})


def _gradients(trainer: MegatronTrainer) -> dict[str, Tensor]:
    parameters = trainer._model.named_parameters()
    return {name: p.main_grad.clone() for name, p in parameters if hasattr(p, "main_grad")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("format", "name"),
    [("int4", _NAME), ("int4_linear", _NAME), ("int4_linear", "llama-tied"), ("int4_linear", "deepseek-v3")],
)
def test_the_exported_int4_model_is_the_one_that_was_trained(
    format: str, name: str, precision: str, tmp_path: Path
) -> None:
    """Train aware, export, quantize, decode: plain training of that model has equal log-probs and equal gradients.

    So the grid is one, and the gradient of the rounded weights reaches the unrounded ones as it is.
    """
    samples, codec = make_samples(name, _COUNT), codec_for(format, _GROUP)
    with trainer_of(name, _config(name, format, precision=precision)) as trainer:
        before = np.concatenate(trainer.log_probs(samples, "policy"))
        trainer.train_step(samples)
        trainer.save(tmp_path / "trained")
        seen = np.concatenate(trainer.log_probs(samples, "policy"))
        masters = {n: t.clone() for n, t in trainer.named_weights()}
        trainer.train_step(samples)
        gradients = _gradients(trainer)
    torch_dist_to_hf(tmp_path / "trained", checkpoint_folder(name) / "hf", tmp_path / "masters")
    quantize_folder(tmp_path / "masters", tmp_path / "int4", format, _GROUP)
    pushed = dict(encode_weights(masters.items(), codec, quantized_in_folder(tmp_path / "int4")))
    with SafetensorsFolder(tmp_path / "int4") as exported:
        assert sorted(pushed) == sorted(exported.names)
        assert all(tensor.equal(exported.read(n)) for n, tensor in pushed.items())
    hf_to_torch_dist(tmp_path / "int4", tmp_path / "decoded")
    plain = run_config(name, samples=_COUNT, trainer={"precision": precision, "optimizer": {"clip_grad": 0}})
    with TemporaryDirectory() as rendezvous:
        trainer = MegatronTrainer(
            plain,
            geometry_of(name),
            rank=0,
            world_size=1,
            init_method=f"file://{rendezvous}/ranks",
            checkpoint=tmp_path / "decoded",
        )
        np.testing.assert_array_equal(np.concatenate(trainer.log_probs(samples, "policy")), seen)
        trainer.train_step(samples)
        expected = _gradients(trainer)
        trainer.close()
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert gradient.equal(expected[parameter]), parameter
    assert not np.array_equal(seen, before)
    assert any(gradient.abs().max() > 1e-4 for n, gradient in gradients.items() if "linear_fc" in n or "fc1" in n)


def test_which_weights_are_rounded() -> None:
    """int4 leaves linear layers as they are; both round experts."""
    weight, x = torch.tensor([[1.0, -1.0, 0.0, 0.5]]), torch.eye(4)
    on_grid = torch.tensor([[0.998046875, -0.998046875, 0.0, 0.5703125]])
    ends = torch.tensor([4], dtype=torch.int32)
    for format, linear in (("int4", weight), ("int4_linear", on_grid)):
        products = Int4AwareProducts(FormatSpec(format, 4), torch.float32)  # type: ignore[arg-type]
        assert products.linear(x, weight).T.equal(linear)
        assert products.grouped(x, weight[None], ends).T.equal(on_grid)


def test_a_weight_is_rounded_to_its_stored_format_first() -> None:
    """A push rounds to the folder's bf16 before it quantizes: 3.5 + 2^-8 is then 3.5, and q of scale 1 becomes 4 (ties
    to even) as it does of 3.5, but -2.5 - 2^-8 becomes -2 where the unrounded value is nearer to -3."""
    weight, x = torch.tensor([[7.0, 3.5 + 2**-8, -2.5 - 2**-8, 1.0]]), torch.eye(4)
    products = Int4AwareProducts(FormatSpec("int4_linear", 4), torch.bfloat16)
    codec = codec_for("int4_linear", 4)
    assert codec is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    shipped = codec.decode(name, dict(codec.encode(name, weight.bfloat16())), torch.float32)
    assert products.linear(x, weight).T.equal(shipped)
    assert shipped.tolist() == [[7.0, 4.0, -2.0, 1.0]]
    unrounded = Int4AwareProducts(FormatSpec("int4_linear", 4), torch.float32)
    assert unrounded.linear(x, weight).tolist() == [[7.0], [4.0], [-3.0], [1.0]]


def test_gradients_pass_straight_through_by_hand() -> None:
    """y = x w with w = [1, -1, 0, 0.5] on the grid of 4: dy/dw = x, and dy/dx = the rounded weights."""
    weight = torch.tensor([[1.0, -1.0, 0.0, 0.5]], requires_grad=True)
    x = torch.tensor([[2.0, 3.0, 5.0, 7.0]], requires_grad=True)
    Int4AwareProducts(FormatSpec("int4_linear", 4), torch.float32).linear(x, weight).sum().backward()
    assert weight.grad is not None and x.grad is not None
    assert weight.grad.tolist() == [[2.0, 3.0, 5.0, 7.0]]
    assert x.grad.tolist() == [[0.998046875, -0.998046875, 0.0, 0.5703125]]


def _log_probs(trainer: MegatronTrainer, samples: list[TrainSample]) -> np.ndarray:
    trainer.train_step(samples)
    return np.concatenate(trainer.log_probs(samples, "policy"))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"expert": 2}, {"pipeline": 2}], ids=lambda p: next(iter(p)))
def test_parallel_layouts_see_the_same_grid(parallel: dict[str, int]) -> None:
    samples = make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, _config(_NAME, "int4_linear")) as trainer:
        expected = _log_probs(trainer, samples)
    config = _config(_NAME, "int4_linear", num_ranks=2, parallel=parallel, micro_batch_size=3)
    for found in on_ranks(_NAME, config, _log_probs, samples):
        # A weight on the border between two values may fall to the other side after a step that differs by rounding.
        assert np.median(np.abs(found - expected)) < 1e-5
        np.testing.assert_allclose(found, expected, atol=0.05)


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"trainer\.qat=true .* found quantize\.format=fp8: set it to int4"):
        _config(_NAME, "fp8")


def test_unequal_group_sizes_are_refused_by_both_numbers(tmp_path: Path) -> None:
    quantize_folder(hf_folder(_NAME), tmp_path / "int4", "int4", 32)
    entry = read_json(tmp_path / "int4" / "config.json")["quantization_config"]
    with pytest.raises(QuantizationError, match=r"groups of 32.*ask for int4 in groups of 128"):
        require_format(entry, "int4", 128)


def test_weights_of_several_formats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a is torch\.float32, b is torch\.bfloat16"):
        stored_dtype(["a", "b"], {"a": torch.float32, "b": torch.bfloat16})
