"""The FP8 and INT4 folders that the quantize stage writes, loaded by SGLang on one H200.

usage: python benchmarks/gpu/quantized_rollout.py OUT_DIR

A random Qwen3-MoE; an engine each in bf16, FP8 and INT4 scores the same tokens and generates. Writes
OUT_DIR/quantized_rollout.json: mean difference of log-probs to bf16 with the quantized engine, how many FP8 matrices
SGLang's own dequantization gives other values for than ours, folder sizes. Ends with an error where one differs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conversion.quantization.checkpoint import quantize_folder, quantized_in_folder
from conversion.quantization.dequantized import open_checkpoint
from conversion.safetensors_io import SafetensorsFolder

# FP8 matrix products by Triton: the other kernels are compiled for ten minutes when first used.
os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"
FORMATS = {"fp8": 128, "int4": 128}
SEQUENCES, LENGTH, NEW = 64, 128, 64
SERVER_ARGS: dict[str, Any] = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_custom_all_reduce": True,
    "mem_fraction_static": 0.3,
    "random_seed": 1,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": SEQUENCES,
    "disable_radix_cache": True,
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
}
RUNNERS = {"bf16": "triton", "fp8": "triton", "int4": "auto"}


def make_model(folder: Path) -> None:
    """A random Qwen3-MoE of 6 layers in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512,
        norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=0,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def scores(folder: Path, runner: str) -> tuple[np.ndarray, float]:
    """Log-probs of fixed tokens, float64 [sequences, length - 1], and tokens a second of a generation."""
    import sglang

    engine = sglang.Engine(model_path=str(folder), moe_runner_backend=runner, **SERVER_ARGS)
    try:
        tokens = np.random.default_rng(0).integers(1, 32000, (SEQUENCES, LENGTH)).tolist()
        scored = engine.generate(
            input_ids=tokens,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        new = {"max_new_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
        engine.generate(input_ids=tokens, sampling_params=new)
        start = time.perf_counter()
        generated = engine.generate(input_ids=tokens, sampling_params=new)
        seconds = time.perf_counter() - start
    finally:
        engine.shutdown()
    count = sum(answer["meta_info"]["completion_tokens"] for answer in generated)
    assert count == SEQUENCES * NEW, f"{count} tokens generated, asked for {SEQUENCES * NEW}"
    log_probs = [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]] for answer in scored]
    return np.array(log_probs, dtype=np.float64), count / seconds


def fp8_differences(folder: Path) -> tuple[int, list[str]]:
    """FP8 matrices in the folder, and those that SGLang dequantizes to other bits than we do."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    names, different = sorted(quantized_in_folder(folder)), []
    with SafetensorsFolder(folder) as stored, open_checkpoint(folder) as ours:
        for name in names:
            weight, scale = stored.read(name), stored.read(f"{name}_scale_inv")
            theirs = block_quant_dequant(weight, scale, [128, 128], torch.bfloat16)
            if not torch.equal(theirs, ours.read(name)):
                different.append(name)
    return len(names), different


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work = Path("/tmp/miles-quantized")
    make_model(work / "bf16")
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    reference, rate = scores(work / "bf16", RUNNERS["bf16"])
    result["bf16"] = {"mean_log_prob": float(reference.mean()), "tokens_per_s": rate}
    for format, group_size in FORMATS.items():
        account = quantize_folder(work / "bf16", work / format, format, group_size)
        result[format] = {"account": account}
        if format == "fp8":
            matrices, different = fp8_differences(work / format)
            result[format] |= {"matrices": matrices, "dequantized_otherwise_by_sglang": len(different)}
            if different:
                sys.exit(f"{len(different)} of {matrices} FP8 matrices differ, the first is {different[0]}")
        found, rate = scores(work / format, RUNNERS[format])
        result[format] |= {
            "mean_log_prob": float(found.mean()),
            "mean_abs_difference": float(np.abs(found - reference).mean()),
            "tokens_per_s": rate,
        }
        (out / "quantized_rollout.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
