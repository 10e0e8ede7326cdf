"""FP8 training against bf16: are the kernels right, how fast are they, does a model learn as well.

usage: python benchmarks/gpu/fp8_training.py OUT_DIR [STEPS]

On a Hopper GPU: the three FP8 products against the same rounded numbers multiplied in float64; seconds of a linear
layer and of 16 experts, forward and backward; the loss over STEPS (200) steps of a random MoE on a Markov chain, in
bf16 and in FP8 from the same weights on the same data. On a CPU the last part alone, emulated, with a smaller model.
Writes OUT_DIR/fp8_training.json after every part, and prints it last. Ends by itself after 8 minutes on a GPU.
"""

import faulthandler
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conversion.families import geometry_from_config
from conversion.hf_to_torch_dist import HF_FOLDER, hf_to_torch_dist
from conversion.random_model import RandomModel, make_random_model
from miles_core.config.run import RunConfig
from miles_core.device import current_device, device_names, device_type, synchronize
from miles_core.precision.fp8 import Fp8Matrix, multiply
from miles_core.precision.fp8_products import Fp8Products
from miles_core.precision.products import PlainProducts, Products
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

LIMIT_S, WARMUP, REPEATS = 480, 3, 10
WINDOW, ALLOWED = 10, 0.01  # steps over which the loss is averaged; relative difference of the curves
LENGTH, STATES = 32, 12
ON_GPU = device_type() != "cpu"
LAYERS, WIDTH, SAMPLES = (8, 512, 64) if ON_GPU else (2, 128, 16)


def kernel_errors() -> dict[str, float]:
    """Largest difference to float64 over the scale of the sums, for each kind of product. The widths have 1 to 8
    blocks, and scales are padded to 4."""
    errors: dict[str, float] = {}
    for m, n, k in ((256, 384, 128), (384, 256, 640), (128, 512, 1024)):
        x = torch.randn(m, k, device=current_device(), dtype=torch.bfloat16)
        w = torch.randn(n, k, device=current_device(), dtype=torch.bfloat16)
        x[0, 0] = 1e3
        rows, square = Fp8Matrix.of_rows(x), Fp8Matrix.of_weight(w)
        pairs = {
            "1x128 by 128x128": (rows, square),
            "1x128 by 128x128 transposed": (Fp8Matrix.of_rows(x @ w.t()), square.transposed()),
            "1x128 by 1x128": (rows, Fp8Matrix.of_rows(w)),
        }
        for name, (a, b) in pairs.items():
            expected = a.decoded().double() @ b.decoded().double().t()
            scale = (a.decoded().abs().double() @ b.decoded().abs().double().t()).max()
            for dtype in (torch.float32, torch.bfloat16):
                error = (multiply(a, b, dtype).double() - expected).abs().max() / scale
                key = f"{name}, {str(dtype).removeprefix('torch.')}"
                errors[key] = max(errors.get(key, 0.0), float(error))
    return errors


def seconds(run: Callable[[], object]) -> float:
    """Median of REPEATS, each waited for."""
    found = []
    for turn in range(WARMUP + REPEATS):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        if turn >= WARMUP:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def speeds() -> dict[str, Any]:
    """Milliseconds forward and backward, and TFLOP/s (6 m n k)."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"device": current_device(), "dtype": torch.bfloat16}
    for m, n, k in ((8192, 4096, 4096), (16384, 7168, 2048)):
        x = torch.randn(m, k, **options).requires_grad_()
        w = torch.randn(n, k, **options).requires_grad_()
        grad = torch.randn(m, n, **options)
        for name, products in _both():
            elapsed = seconds(partial(_linear, products, x, w, grad))
            found[f"linear {m} {n} {k} {name}"] = _speed(elapsed, 6 * m * n * k)
    m, n, k, experts = 16384, 1536, 2048, 16
    rows = torch.randn(m, k, **options).requires_grad_()
    w = torch.randn(experts, n, k, **options).requires_grad_()
    grad = torch.randn(m, n, **options)
    ends = torch.arange(1, experts + 1, device=current_device(), dtype=torch.int32) * (m // experts)
    for name, products in _both():
        elapsed = seconds(partial(_experts, products, rows, w, ends, grad))
        found[f"{experts} experts {m} {n} {k} {name}"] = _speed(elapsed, 6 * m * n * k)
    x = torch.randn(8192, 4096, **options)
    found["rounding 8192 4096, ms"] = 1e3 * seconds(lambda: Fp8Matrix.of_rows(x))
    return found


def _linear(products: Products, x: Tensor, weight: Tensor, grad: Tensor) -> None:
    products.linear(x, weight).backward(grad)


def _experts(products: Products, rows: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> None:
    products.grouped(rows, weight, ends).backward(grad)


def _both() -> list[tuple[str, Products]]:
    return [("bf16", PlainProducts()), ("fp8", Fp8Products())]


def _speed(elapsed: float, flops: int) -> dict[str, float]:
    return {"ms": 1e3 * elapsed, "tflops": flops / elapsed / 1e12}


def curves(steps: int) -> dict[str, Any]:
    """Losses in bf16 and in FP8, and how far the curves lie apart."""
    with tempfile.TemporaryDirectory() as folder:
        shape = RandomModel(
            num_layers=LAYERS, num_dense_layers=1, hidden_size=WIDTH, num_heads=4, num_kv_heads=2, head_dim=64,
            ffn_hidden_size=2 * WIDTH, num_experts=8, top_k=2, moe_ffn_hidden_size=WIDTH, num_mtp_layers=0,
            max_position=64, seed=0,
        )  # fmt: skip
        hf, checkpoint = Path(folder, "hf"), Path(folder, "checkpoint")
        hf.mkdir()
        make_random_model(hf, **asdict(shape))
        hf_to_torch_dist(hf, checkpoint)
        found = {name: losses(checkpoint, fp8, steps) for name, fp8 in (("bf16", False), ("fp8", True))}
    smooth = {name: np.convolve(r["losses"], np.ones(WINDOW) / WINDOW, "valid") for name, r in found.items()}
    apart = np.abs(smooth["fp8"] / smooth["bf16"] - 1)
    return found | {"largest_relative_difference": float(apart.max()), "at_the_end": float(apart[-1])}


def losses(checkpoint: Path, fp8: bool, steps: int) -> dict[str, Any]:
    config = RunConfig.model_validate(
        {
            "model": {"random": {}},
            "data": {"task": {}},
            "rollout": {"batch_size": SAMPLES, "n_samples_per_prompt": 1},
            "algorithm": {"advantage_estimator": "none", "policy_loss": "sft"},
            "trainer": {
                "precision": "bf16",
                "fp8": fp8,
                "micro_batch_size": SAMPLES,
                "optimizer": {"lr": 1e-3, "warmup_steps": 20},
            },
        }
    )
    geometry = geometry_from_config(json.loads((checkpoint / HF_FOLDER / "config.json").read_text()))
    chain = np.random.default_rng(0).dirichlet(np.full(STATES, 0.5), STATES)
    with tempfile.TemporaryDirectory() as rendezvous:
        trainer = MegatronTrainer(
            config, geometry, rank=0, world_size=1, init_method=f"file://{rendezvous}/ranks", checkpoint=checkpoint
        )
        found, times = [], []
        for step in range(steps):
            batch = [markov_sample(chain, step * SAMPLES + i) for i in range(SAMPLES)]
            start = time.perf_counter()
            metrics = trainer.train_step(batch)
            times.append(time.perf_counter() - start)
            if metrics["train/skipped_steps"] or metrics.get("train/fp8_non_finite_blocks"):
                sys.exit(f"step {step} was not finite: {metrics}")
            found.append(metrics["train/loss"])
        trainer.close()
    return {"losses": found, "seconds_per_step": statistics.median(times)}


def markov_sample(chain: np.ndarray, number: int) -> TrainSample:
    """A walk of which all but the first token are learned; its loss can't fall below the chain's entropy."""
    rng = np.random.default_rng([1, number])
    tokens = [int(rng.integers(STATES))]
    for _ in range(LENGTH - 1):
        tokens.append(int(rng.choice(STATES, p=chain[tokens[-1]])))
    count = LENGTH - 1
    return TrainSample(
        index=number,
        tokens=np.array(tokens, dtype=np.int32),
        response_length=count,
        loss_mask=np.ones(count, dtype=np.uint8),
        loss_weights=np.full(count, 1 / (count * SAMPLES), dtype=np.float32),
        advantages=np.zeros(count, dtype=np.float32),
        rollout_log_probs=np.zeros(count, dtype=np.float32),
    )


def main(out: Path, steps: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "devices": device_names() or ["cpu"],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "window": WINDOW,
    }
    parts: dict[str, Callable[[], Any]] = {"curve": lambda: curves(steps)}
    if ON_GPU:
        signal.alarm(LIMIT_S)
        faulthandler.dump_traceback_later(LIMIT_S - 5)
        parts = {"kernel_errors": kernel_errors, "speed": speeds} | parts
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            result[name] = part()
        except Exception as error:  # the other parts still say something
            result[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(name, f"{time.perf_counter() - start:.1f} s", flush=True)
        (out / "fp8_training.json").write_text(json.dumps(result))
    print(json.dumps(result))
    if "error" in result["curve"] or result["curve"]["largest_relative_difference"] > ALLOWED:
        sys.exit(f"the curves lie further apart than {ALLOWED}, or a part failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
