"""The embedded engine on a GPU gives what it gives on the CPU."""

from pathlib import Path

import numpy as np
import pytest
from embedded_models import VOCAB, write_model

from miles_core.device import device_type
from miles_core.rollout.embedded import moe
from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.rollout.engine import GenerateRequest, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cheap_waste", [0, 10**9], ids=["sorted experts", "all experts"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "gemma2", "gemma3", "minimax_m2"])
def test_gpu_equals_cpu(family: str, cheap_waste: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_CHEAP_WASTE", cheap_waste)
    write_model(family, tmp_path)
    rng = np.random.default_rng(0)
    requests = [
        GenerateRequest(str(i), rng.integers(4, VOCAB, size=3 + i, dtype=np.int32), SamplingParams(1.0, 0.9, 20, 8), i)
        for i in range(16)
    ]
    on_cpu = EmbeddedEngine(tmp_path).generate(requests)
    on_gpu = EmbeddedEngine(tmp_path, device=device_type(), max_batch_tokens=100).generate(requests)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours.output_ids.tolist() == theirs.output_ids.tolist()
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-3)
        np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)

    half = EmbeddedEngine(tmp_path, device=device_type(), dtype="bfloat16")
    sequences = [np.concatenate((r.prompt_ids, c.output_ids)) for r, c in zip(requests, on_cpu, strict=True)]
    scores = zip(half.score(sequences), EmbeddedEngine(tmp_path).score(sequences), strict=True)
    assert np.mean(np.concatenate([np.abs(rounded - exact) for rounded, exact in scores])) < 0.1
