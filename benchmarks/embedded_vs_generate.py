"""Embedded engine against `transformers.generate`: ragged responses on one CPU thread.

128 different prompts to a 1.0M-parameter Qwen3-MoE; response lengths are spread so that their mean is a quarter of the
longest, as in RL rollouts. `generate` runs them as one padded batch until the longest is done; its fastest experts
implementation is used, and unlike ours it is asked for neither log-probs nor routed experts. Tokens per second count
the wanted tokens only, for both. The two take turns, and the ratio is the median over the turns, so that whatever else
the machine does weighs little. Prints a table and, with --json, writes the numbers.

usage: python benchmarks/embedded_vs_generate.py [--json FILE] [--repeats 5] [--max-new-tokens 128]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.rollout.engine import GenerateRequest, SamplingParams

NUM_PROMPTS = 128
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def workload(max_new_tokens: int) -> list[GenerateRequest]:
    """Prompts of 8 to 24 tokens; response lengths at the quantiles of a power law, mean a quarter of the maximum."""
    rng = np.random.default_rng(0)
    quantiles = (np.arange(NUM_PROMPTS) + 0.5) / NUM_PROMPTS
    lengths = np.ceil(max_new_tokens * quantiles**3).astype(int)  # the mean of u^3 is 1/4
    lengths[-1] = max_new_tokens
    rng.shuffle(lengths)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=rng.integers(2, 64, size=rng.integers(8, 25), dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=int(length)),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]


def generate_runner(folder: Path, requests: list[GenerateRequest], implementation: str) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation).eval()
    width = max(len(r.prompt_ids) for r in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    longest = max(r.sampling.max_new_tokens for r in requests)

    def run() -> None:
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest
        )
        assert out.shape[1] == width + longest

    return run


def engine_runner(folder: Path, requests: list[GenerateRequest]) -> Callable[[], None]:
    engine = EmbeddedEngine(folder)

    def run() -> None:
        completions = engine.generate(requests)
        assert [len(c.output_ids) for c in completions] == [r.sampling.max_new_tokens for r in requests]

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)

    requests = workload(options.max_new_tokens)
    wanted = sum(r.sampling.max_new_tokens for r in requests)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        peers = {name: generate_runner(Path(folder), requests, name) for name in EXPERTS_IMPLEMENTATIONS}
        trial = {name: min(seconds(run), seconds(run)) for name, run in peers.items()}  # also warms up
        fastest = min(trial, key=trial.__getitem__)
        ours = engine_runner(Path(folder), requests)
        seconds(ours)
        times: dict[str, list[float]] = {"embedded engine": [], f"generate ({fastest})": []}
        for _ in range(options.repeats):
            for label, run in zip(times, (ours, peers[fastest]), strict=True):
                times[label].append(seconds(run))

    mine, theirs = times.values()
    speedup = statistics.median(their / my for my, their in zip(mine, theirs, strict=True))
    print(f"{NUM_PROMPTS} prompts, {wanted} tokens wanted, longest {options.max_new_tokens}, 1 thread")
    print(f"{'':24}{'seconds':>10}{'tokens/s':>12}{'ratio':>8}")
    for (label, values), ratio in zip(times.items(), (speedup, 1.0), strict=True):
        median = statistics.median(values)
        print(f"{label:24}{median:10.3f}{wanted / median:12,.0f}{ratio:8.2f}")
    if options.json:
        result = {
            "num_prompts": NUM_PROMPTS,
            "wanted_tokens": wanted,
            "max_new_tokens": options.max_new_tokens,
            "seconds": times,
            "peer_trial_seconds": trial,
            "speedup": speedup,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
