"""A checkpoint larger than memory converts: the peak follows the largest tensors, not the model."""

import runpy
from pathlib import Path

import pytest

from conversion.safetensors_header import read_headers

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "convert_vs_cp.py"


@pytest.mark.slow
def test_peak_memory_stays_below_three_shards(tmp_path: Path) -> None:
    benchmark = runpy.run_path(str(BENCHMARK))
    hf, torch_dist, back = (tmp_path / name for name in ("hf", "torch_dist", "back"))
    benchmark["make_checkpoint"](hf, 10**9, 10**8)
    sizes: dict[str, int] = {}
    for spec in read_headers(hf).values():
        sizes[spec.file] = sizes.get(spec.file, 0) + spec.nbytes
    assert len(sizes) >= 10 and sum(sizes.values()) > 0.9 * 10**9
    for direction, src, dst in (("to_torch_dist", hf, torch_dist), ("to_hf", torch_dist, back)):
        peak = benchmark["convert"](direction, src, dst)["peak_bytes"]
        assert 0 < peak <= 3 * max(sizes.values()), (direction, peak, max(sizes.values()))
