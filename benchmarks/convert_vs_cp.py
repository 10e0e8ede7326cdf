"""Speed and memory of the conversion both ways, beside `cp -r` of the same checkpoint on the same disk.

    python benchmarks/convert_vs_cp.py --gigabytes 2 --out result.json

Makes a synthetic mixture of experts in many shards, then times, in turn, `cp -r`, HF -> torch_dist and torch_dist ->
HF, each conversion in a process of its own, whose peak resident memory is reported above that of its imports. Ratios
are of bytes a second, from the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conversion.safetensors_header import read_headers

GIGABYTE = 10**9
EXPERTS, WIDTH, EXPERT_WIDTH = 64, 2048, 1024
EXPERT_BYTES = 3 * 2 * WIDTH * EXPERT_WIDTH

# A conversion in a process of its own: seconds, and how far resident memory rose above that of the imports. getrusage
# would not do: its peak survives exec, so it starts with that of this process.
CONVERT = """
import json, sys, time
from pathlib import Path
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.torch_dist_to_hf import torch_dist_to_hf

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

direction, src, dst = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
before, start = memory("VmRSS"), time.perf_counter()
if direction == "to_torch_dist":
    hf_to_torch_dist(src, dst)
else:
    torch_dist_to_hf(src, src / "hf", dst)
print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": memory("VmHWM") - before}))
"""


def make_checkpoint(folder: Path, nbytes: int, shard_bytes: int) -> None:
    """A GLM-4.5-type MoE of about `nbytes` in bf16; every tensor is the same noise, moved on."""
    import torch

    from conversion.families import geometry_from_config, rules_for
    from conversion.safetensors_io import SafetensorsWriter

    layers = max(2, round(nbytes / (EXPERTS * EXPERT_BYTES)) + 1)
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "topk_group": 1,
        "use_qk_norm": True,
        "vocab_size": 8192,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.randn(1 << 25).to(torch.bfloat16)
    with SafetensorsWriter(folder, shard_bytes) as writer:
        for i, rule in enumerate(rules_for(geometry_from_config(config), 0)):
            for name, shape in rule.hf_shapes().items():
                start = i * 4096 % (len(noise) // 4)
                writer.write(name, noise[start : start + torch.Size(shape).numel()].reshape(shape))


def convert(direction: str, src: Path, dst: Path) -> dict[str, float]:
    """Seconds and peak bytes of one conversion in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, direction, str(src), str(dst)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def copy(src: Path, dst: Path) -> dict[str, float]:
    """Seconds of `cp -r`."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(src), str(dst)], check=True)
    return {"seconds": time.perf_counter() - start}


def measure(work: Path, nbytes: int, shard_bytes: int, repeats: int) -> dict[str, Any]:
    """Runs the three in turn, so that whatever else the machine does meets them alike."""
    hf, torch_dist, out = work / "hf", work / "torch_dist", work / "out"
    make_checkpoint(hf, nbytes, shard_bytes)
    convert("to_torch_dist", hf, torch_dist)
    runs: dict[str, list[dict[str, float]]] = {"cp -r": [], "HF -> torch_dist": [], "torch_dist -> HF": []}
    for _ in range(repeats):
        for name, run in (
            ("cp -r", lambda: copy(hf, out)),
            ("HF -> torch_dist", lambda: convert("to_torch_dist", hf, out)),
            ("torch_dist -> HF", lambda: convert("to_hf", torch_dist, out)),
        ):
            os.sync()  # nobody pays for what another one has left to write
            runs[name].append(run())
            shutil.rmtree(out)
    specs = read_headers(hf).values()
    size = sum(spec.nbytes for spec in specs)
    shards: dict[str, int] = {}
    for spec in specs:
        shards[spec.file] = shards.get(spec.file, 0) + spec.nbytes
    seconds = {name: statistics.median(run["seconds"] for run in done) for name, done in runs.items()}
    return {
        "bytes": size,
        "shards": len(shards),
        "largest_shard_bytes": max(shards.values()),
        "repeats": repeats,
        "results": {
            name: {
                "seconds": seconds[name],
                "bytes_per_second": size / seconds[name],
                "ratio_to_cp": seconds["cp -r"] / seconds[name],
                "peak_bytes": max((run.get("peak_bytes", 0) for run in done), default=0),
            }
            for name, done in runs.items()
        },
    }


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['bytes'] / GIGABYTE:.2f} GB in {report['shards']} shards, {report['repeats']} runs")
    for column in ("", "median s", "GB/s", "of cp's speed", "peak memory / largest shard"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in report["results"].items():
        memory = result["peak_bytes"] / report["largest_shard_bytes"]
        speed = f"{result['bytes_per_second'] / GIGABYTE:.2f}"
        ratio = f"{result['ratio_to_cp']:.2f}"
        table.add_row(name, f"{result['seconds']:.2f}", speed, ratio, f"{memory:.2f}" if memory else "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--shard-megabytes", type=int, default=200, help="size of a shard")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work (four times the size is needed); default: temporary")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        report = measure(Path(work), int(args.gigabytes * GIGABYTE), args.shard_megabytes * 10**6, args.repeats)
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    show(report)


if __name__ == "__main__":
    main()
