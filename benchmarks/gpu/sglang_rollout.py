"""Rollout through our stack against `sglang.Engine` called directly: same model, same requests, one H200.

usage: python benchmarks/gpu/sglang_rollout.py OUT_DIR

Writes OUT_DIR/sglang_rollout.json: tokens per second of both (medians), their ratio, the weight push, a server killed
in mid-rollout, and OUT_DIR/sglang_wire.json, a request and its answer as the server sent them.
"""

import json
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_core.config.rollout import SglangConfig
from miles_core.rollout.engine import GenerateRequest, SamplingParams
from miles_core.rollout.sglang.client import post
from miles_core.rollout.sglang.engine import SglangEngine
from miles_core.rollout.sglang.wire import generate_payload
from miles_core.weight_sync.bucket import bucketize

REQUESTS, PROMPT, NEW, REPEATS = 256, 64, 256, 3
SERVER_ARGS: dict[str, str | int | float | bool] = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "moe_runner_backend": "triton",
    "disable_custom_all_reduce": True,
    "mem_fraction_static": 0.4,
    "random_seed": 1,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": REQUESTS,
    "disable_radix_cache": True,
}


def make_model(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """A random 644M Qwen3-MoE in bf16; returns its tensors under their checkpoint names."""
    from safetensors.torch import load_file

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512,
        norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=0,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="10GB")
    return load_file(folder / "model.safetensors")


def requests(count: int, new: int = NEW) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new)
    return [
        GenerateRequest(f"r{i}", rng.integers(1, 32000, PROMPT).astype(np.int32), sampling, seed=i)
        for i in range(count)
    ]


def timed(call) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = call()
    return time.perf_counter() - start, tokens


def direct(folder: Path) -> list[float]:
    """Tokens per second of sglang.Engine, log-probs and routed experts returned."""
    import sglang

    engine = sglang.Engine(
        model_path=str(folder), skip_tokenizer_init=False, enable_return_routed_experts=True, **SERVER_ARGS
    )
    batch = requests(REQUESTS)
    body = generate_payload(batch, routed_experts=True, deterministic=False)

    def call() -> int:
        out = engine.generate(
            input_ids=body["input_ids"], sampling_params=body["sampling_params"], return_logprob=True,
            return_routed_experts=True,
        )  # fmt: skip
        return sum(o["meta_info"]["completion_tokens"] for o in out)

    call()
    rates = [tokens / seconds for seconds, tokens in (timed(call) for _ in range(REPEATS))]
    engine.shutdown()
    return rates


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work = Path("/tmp/sglang-bench")
    first, second = work / "first", work / "second"
    make_model(first, 0)
    other = make_model(second, 1)
    result: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    direct_rates = direct(first)
    result["direct_tokens_per_s"] = direct_rates

    settings = SglangConfig(server_args=SERVER_ARGS)
    start = time.perf_counter()
    engine = SglangEngine(first, settings)
    result["start_s"] = time.perf_counter() - start
    small = generate_payload(requests(2, new=8), routed_experts=True, deterministic=False)
    recorded = post(engine._server.url, "/generate", small)
    (out / "sglang_wire.json").write_text(json.dumps({"request": small, "answer": recorded}))

    def ours(calls: int) -> int:
        return sum(len(c.output_ids) for c in engine.generate(requests(calls)))

    for size in (32, 64, 256):
        engine._settings = settings.model_copy(update={"requests_per_call": size})
        ours(REQUESTS)
        rates = [tokens / seconds for seconds, tokens in (timed(lambda: ours(REQUESTS)) for _ in range(REPEATS))]
        result[f"ours_tokens_per_s_{size}_per_call"] = rates
        result[f"ratio_{size}_per_call"] = statistics.median(rates) / statistics.median(direct_rates)

    fixed = requests(4, new=1)
    before = engine.generate(fixed)
    buckets = list(bucketize(((n, t.cuda()) for n, t in other.items()), 512 * 2**20))
    pushes = []
    for version in (1, 2, 3):
        seconds, _ = timed(lambda v=version: engine.update_weights(buckets, v) or 0)
        pushes.append(seconds)
    nbytes = sum(b.data.nbytes for b in buckets)
    after = engine.generate(fixed)
    result |= {
        "push_bytes": nbytes,
        "push_s": pushes,
        "push_GB_per_s": nbytes / min(pushes) / 1e9,
        "version_after_push": after[0].weight_versions.tolist(),
        "first_log_prob_before_after": [float(before[0].log_probs[0]), float(after[0].log_probs[0])],
    }
    killer = threading.Timer(1.0, lambda: engine._server._process.kill())
    engine._settings = settings
    killer.start()
    answers = engine.generate(requests(REQUESTS, new=512))
    result["after_kill"] = {
        "answers": len(answers), "unique": len({a.request_id for a in answers}),
        "versions": sorted({int(v) for a in answers for v in a.weight_versions}),
        "restarts_left": engine._server._restarts_left,
    }  # fmt: skip
    greedy = [GenerateRequest(r.request_id, r.prompt_ids, SamplingParams(0.0, max_new_tokens=1), 0) for r in fixed]
    pushed = [float(c.log_probs[0]) for c in engine.generate(greedy)]
    engine.close()
    fresh = SglangEngine(second, settings)
    from_disk = [float(c.log_probs[0]) for c in fresh.generate(greedy)]
    fresh.close()
    result["greedy_log_probs_pushed_and_from_disk"] = [pushed, from_disk]
    (out / "sglang_rollout.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
