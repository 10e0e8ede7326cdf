"""GRPO with SGLang rollouts and the Megatron trainer on one GPU: a GLM-4.5-type MoE learns to sort digits in bf16.

usage: python benchmarks/gpu/grpo.py OUT_DIR [ROLLOUTS]

Runs download, convert, quantize, train and export as `miles run` does, on a random model of 8 layers, and
writes OUT_DIR/grpo.json: the reward curve, the difference between training and rollout log-probs, seconds of each part.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch

from miles_core.config.run import RunConfig
from miles_core.observability.metrics import read_json_lines
from storage.store import ArtifactStore
from tasks.pipeline import run_single_stage

WINDOW = 10  # rollouts over which the curve is averaged


def config(store: Path, rollouts: int) -> RunConfig:
    """A mid-sized model, so that kernels for real head and expert sizes run."""
    return RunConfig.model_validate(
        {
            "name": "grpo-gpu",
            "store": {"uri": str(store)},
            "model": {
                "random": {
                    "num_layers": 8, "num_dense_layers": 1, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4,
                    "head_dim": 64, "ffn_hidden_size": 1024, "num_experts": 16, "top_k": 4, "moe_ffn_hidden_size": 256,
                }
            },
            "data": {"task": {"name": "sort_digits", "params": {"num_digits": 3}}},
            "rollout": {
                "engine": "sglang",
                "num_rollout": rollouts,
                "batch_size": 32,
                "n_samples_per_prompt": 16,
                "sampling": {"max_new_tokens": 4},
                "sglang": {
                    "requests_per_call": 128,
                    "server_args": {
                        "attention_backend": "fa3", "sampling_backend": "pytorch", "grammar_backend": "none",
                        "moe_runner_backend": "triton", "disable_custom_all_reduce": True, "mem_fraction_static": 0.3,
                        "dtype": "bfloat16", "cuda_graph_backend_prefill": "disabled",
                        "cuda_graph_max_bs_decode": 512, "max_running_requests": 512,
                    },
                },
            },
            "algorithm": {"entropy_coef": 0.02, "off_policy": {"method": "tis"}},
            "trainer": {
                "precision": "bf16",
                "micro_batch_size": 512,
                "optimizer": {"lr": 5e-4, "warmup_steps": 10},
                "checkpoint": {"interval": 50},
            },
        }
    )  # fmt: skip


def main(out: Path, rollouts: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    store = Path("/tmp/miles-grpo")
    shutil.rmtree(store, ignore_errors=True)
    run = config(store, rollouts)
    seconds = {}
    for stage in ("download", "convert", "quantize", "train", "export"):
        start = time.perf_counter()
        outcomes = run_single_stage(run, stage)
        seconds[stage] = time.perf_counter() - start
        print(stage, f"{seconds[stage]:.1f} s", flush=True)
        if stage == "train":
            manifest = ArtifactStore(str(store)).manifest(outcomes["train"].ref)
            rows = read_json_lines(store / "train" / outcomes["train"].ref.key / manifest.outputs["metrics"])
    names = [
        "rollout/raw_reward", "train/train_rollout_logprob_abs_diff", "train/train_rollout_kl", "train/ess_ratio",
        "train/routing_replay_overlap", "train/grad_norm", "perf/rollout_time", "perf/actor_train_time",
        "perf/update_weights_time", "perf/step_time",
    ]  # fmt: skip
    curve = [
        {name: sum(row[name] for row in rows[i : i + WINDOW]) / len(rows[i : i + WINDOW]) for name in names}
        for i in range(0, len(rows), WINDOW)
    ]
    result = {
        "gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "seconds": seconds,
        "window": WINDOW, "curve": curve, "last_row": rows[-1],
    }  # fmt: skip
    (out / "grpo.json").write_text(json.dumps(result, indent=1))
    for i, point in enumerate(curve):
        print(i * WINDOW, *[f"{name.split('/')[-1]}={value:.4g}" for name, value in point.items()])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
