"""Weights into a running SGLang server from another process: how fast by each way, and whether they arrive.

usage: python benchmarks/gpu/weight_push.py OUT_DIR [SECONDS]

One server start, a random Qwen3-MoE of 1.2B parameters in bf16 (2.3 GB, 2,100 tensors). Writes OUT_DIR/weight_push.json
again after each part, and prints it at the end. A part that fails is recorded with its error and the next one runs;
after SECONDS (170) the script ends with what it has.
"""

import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import miles_core.weight_sync.broadcast as broadcast
from miles_core.config.rollout import SglangConfig
from miles_core.device import current_device, empty_cache, synchronize
from miles_core.rollout.engine import GenerateRequest, SamplingParams
from miles_core.rollout.sglang.client import post
from miles_core.rollout.sglang.engine import SglangEngine
from miles_core.rollout.sglang.weights import make_handle
from miles_core.weight_sync.bucket import WeightSyncError, bucketize
from miles_core.weight_sync.digest import bucket_digests, digests_in_rows, named_digests
from miles_core.weight_sync.layout import forms_of, in_rows
from miles_core.weight_sync.local import local_receiver
from miles_core.weight_sync.packing import copy_all
from miles_core.weight_sync.sender import Receiver
from miles_core.weight_sync.shared import SharedMemorySender, read_back

MIB = 2**20
PUSHES = 7
SIZES = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
SERVER_ARGS: dict[str, str | int | float | bool] = {
    "attention_backend": "fa3", "sampling_backend": "pytorch", "grammar_backend": "none",
    "moe_runner_backend": "triton", "disable_custom_all_reduce": True, "mem_fraction_static": 0.4, "random_seed": 1,
    "dtype": "bfloat16", "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 16,
    "disable_radix_cache": True,
}  # fmt: skip
Named = dict[str, torch.Tensor]


def make_model(folder: Path, seed: int, sizes: dict[str, int]) -> Named:
    """A random model on disk; its tensors on the device under their checkpoint names."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **sizes, norm_topk_prob=True, tie_word_embeddings=False, eos_token_id=0, bos_token_id=None, pad_token_id=0
    )
    with current_device():
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20GB")
    del model
    empty_cache()
    return {name: tensor.to(current_device()) for name, tensor in load_file(folder / "model.safetensors").items()}


class Benchmark:
    """The parts, in order; each writes to `result`."""

    def __init__(self, out: Path, sizes: dict[str, int], server_args: dict[str, Any], module: str) -> None:
        self._file = out / "weight_push.json"
        work = Path("/tmp/weight-push")
        self.result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
        if torch.cuda.is_available():
            self.result["gpu"] = torch.cuda.get_device_name()
        self._folders = [work / "first", work / "second"]
        first, self._tensors = (make_model(folder, seed, sizes) for seed, folder in enumerate(self._folders))
        self._others = {name: tensor.clone() for name, tensor in first.items()}
        del first
        self._bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self.result |= {"bytes": self._bytes, "tensors": len(self._tensors)}
        settings = SglangConfig(
            server_args=server_args, startup_timeout=120, release_in_training=("kv_cache", "weights")
        )
        start = time.perf_counter()
        self._engine = SglangEngine(self._folders[0], settings, module=module)
        self.result["server_start_s"] = time.perf_counter() - start
        self._receiver: Receiver = local_receiver(self._engine.push_receiver())
        self._version = 0
        prompts = np.random.default_rng(0).integers(1, sizes["vocab_size"], (4, 16)).astype(np.int32)
        greedy = SamplingParams(0.0, max_new_tokens=4)
        self._requests = [GenerateRequest(f"r{i}", ids, greedy, seed=i) for i, ids in enumerate(prompts)]

    def part(self, name: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            self.result[name] = call()
        except Exception:
            self.result[name] = {"error": traceback.format_exc()[-1500:]}
        print(name, f"{time.perf_counter() - start:.1f} s", self.result[name], flush=True)
        self.write()

    def write(self) -> None:
        self._file.write_text(json.dumps(self.result, indent=1))

    def close(self) -> None:
        self._engine.close()

    def log_probs(self) -> list[float]:
        return [float(x) for c in self._engine.generate(self._requests) for x in c.log_probs]

    def push(self, sender: Any, tensors: Named, *, verify: bool) -> Any:
        self._version += 1
        return sender.push(tensors.items(), [self._receiver], self._version, verify=verify)

    def ipc(self, bucket_bytes: int) -> dict[str, Any]:
        """The first push with the proof, which also records how to load; then without."""
        sender = SharedMemorySender(bucket_bytes, make_handle)
        first = self.push(sender, self._others, verify=True)
        proven = self.push(sender, self._tensors, verify=True)
        plain = [self.push(sender, (self._others, self._tensors)[i % 2], verify=False) for i in range(PUSHES)]
        last = self.push(sender, self._tensors, verify=True)
        rates = [report.nbytes / 1e9 / report.total_seconds for report in plain]
        fastest = min(plain, key=lambda report: report.total_seconds)
        return {
            "buckets": first.buckets, "first_s": first.total_seconds, "with_proof_s": proven.total_seconds,
            "proof_s": proven.seconds["verify"], "push_s": [report.total_seconds for report in plain],
            "GB_per_s_median": statistics.median(rates), "GB_per_s_best": max(rates),
            "fastest_parts_s": fastest.seconds, "verified": [first.verified, proven.verified, last.verified],
        }  # fmt: skip

    def calls(self) -> dict[str, float]:
        """Seconds of a bare pause and continue: what a push costs beside its bytes."""
        url, seconds = self._engine._server.url, {}
        for path, body in (
            ("/pause_generation", {"mode": "retract"}), ("/continue_generation", {"torch_empty_cache": False}),
        ):  # fmt: skip
            taken = []
            for _ in range(5):
                start = time.perf_counter()
                post(url, path, body)
                taken.append(time.perf_counter() - start)
            seconds[path] = min(taken)
        return seconds

    def host(self) -> dict[str, float]:
        start = time.perf_counter()
        buckets = list(bucketize(self._tensors.items(), 512 * MIB))
        packed = time.perf_counter()
        self._version += 1
        self._engine.update_weights(buckets, self._version)
        seconds = time.perf_counter() - start
        return {"to_host_s": packed - start, "s": seconds, "GB_per_s": self._bytes / 1e9 / seconds}

    def broadcast(self) -> dict[str, Any]:
        """NCCL wants a GPU for each rank: with one, gloo shows that the protocol holds, and nothing of its speed."""
        if torch.cuda.device_count() < 2:
            broadcast.broadcast_backend = lambda: "gloo"
        sender = broadcast.BroadcastSender(512 * MIB, "127.0.0.1")
        proven = self.push(sender, self._tensors, verify=True)
        plain = self.push(sender, self._tensors, verify=False)
        sender.close()
        return {
            "backend": broadcast.broadcast_backend(), "s": plain.total_seconds, "verified": proven.verified,
            "GB_per_s": self._bytes / 1e9 / plain.total_seconds,
        }  # fmt: skip

    def missing(self) -> dict[str, Any]:
        """A push without one tensor must not end; one after it makes good."""
        sender = SharedMemorySender(512 * MIB, make_handle)
        lost = "model.layers.3.mlp.experts.5.up_proj.weight"
        lost = lost if lost in self._tensors else next(reversed(self._tensors))
        try:
            self.push(sender, {n: t for n, t in self._tensors.items() if n != lost}, verify=False)
            refused = "not refused"
        except WeightSyncError as error:
            refused = str(error)
        return {"refused": refused, "then_verified": self.push(sender, self._tensors, verify=True).verified}

    def against_disk(self) -> dict[str, Any]:
        """Pushed and loaded from disk by SGLang itself: log-probs, and digests of what the server holds."""
        sender = SharedMemorySender(1024 * MIB, make_handle)
        self.push(sender, self._others, verify=False)
        other = self.log_probs()
        self.push(sender, self._tensors, verify=False)
        pushed = self.log_probs()
        self.push(sender, self._others, verify=False)
        body = {"model_path": str(self._folders[1]), "flush_cache": True}
        answer = post(self._engine._server.url, "/update_weights_from_disk", body)
        disk = self.log_probs()
        layout, sent = digests_in_rows(forms_of(list(self._tensors.items())), list(self._tensors.values()))
        held = read_back([layout], self._receiver, make_handle)
        return {
            "answer": answer, "log_probs_equal": pushed == disk, "changed_by_push": other != pushed,
            "max_difference": max(abs(a - b) for a, b in zip(pushed, disk, strict=True)),
            "digests_equal": held == named_digests(sent, layout.specs), "log_probs": pushed[:4],
        }  # fmt: skip

    def digest(self) -> dict[str, Any]:
        """Speed on the device, and the same values on a CPU."""
        named = list(self._tensors.items())
        layout = in_rows(forms_of(named))
        flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=current_device())
        copy_all(layout.views(flat), [tensor for _, tensor in named])
        seconds = []
        for _ in range(4):
            synchronize()
            start = time.perf_counter()
            found = bucket_digests(flat, layout.specs)
            synchronize()
            seconds.append(time.perf_counter() - start)
        few = layout.specs[:50]
        layout_few, on_cpu = digests_in_rows(forms_of(named[:50]), [tensor.cpu() for _, tensor in named[:50]])
        equal = named_digests(found[:50], few) == named_digests(on_cpu, layout_few.specs)
        return {"GB_per_s": self._bytes / 1e9 / min(seconds), "s": min(seconds), "equal_on_cpu": equal}

    def release(self) -> dict[str, Any]:
        """Memory for a trainer on the same GPU, and the push that brings the weights back."""
        sender = SharedMemorySender(1024 * MIB, make_handle)
        self.push(sender, self._tensors, verify=False)
        before, free = self.log_probs(), _free_memory()
        start = time.perf_counter()
        self._engine.push_receiver().release_memory(["kv_cache", "weights"])
        released, freed = time.perf_counter() - start, _free_memory() - free
        report = self.push(sender, self._tensors, verify=True)
        return {
            "freed_GB": freed / 1e9, "release_s": released, "resume_and_push_s": report.total_seconds,
            "verified": report.verified, "log_probs_equal": self.log_probs() == before,
        }  # fmt: skip


def _free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def main(
    out: Path,
    seconds: float,
    sizes: dict[str, int] = SIZES,
    server_args: dict[str, Any] = SERVER_ARGS,
    module: str = "sglang.launch_server",
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(out, sizes, server_args, module)

    def give_up() -> None:
        benchmark.result["gave_up_after_s"] = seconds
        benchmark.write()
        benchmark.close()
        print(json.dumps(benchmark.result, indent=1), flush=True)
        os._exit(1)

    watch = threading.Timer(seconds, give_up)
    watch.daemon = True
    watch.start()
    benchmark.part("calls", benchmark.calls)
    for mib in (512, 1024, 4096, 256):
        benchmark.part(f"ipc_{mib}_MiB", lambda mib=mib: benchmark.ipc(mib * MIB))
    benchmark.part("digest", benchmark.digest)
    benchmark.part("against_disk", benchmark.against_disk)
    benchmark.part("missing", benchmark.missing)
    benchmark.part("host", benchmark.host)
    benchmark.part("release", benchmark.release)
    benchmark.part("broadcast", benchmark.broadcast)
    benchmark.close()
    watch.cancel()
    print(json.dumps(benchmark.result, indent=1), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 170.0)
