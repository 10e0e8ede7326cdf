"""trainer.exact: the rollout's log-probs and the trainer's, equal in every bit. Not close: equal."""

from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, trainer_of
from trainer_models import MODELS, geometry_of, hf_folder, run_config

from miles_core.config.run import RunConfig
from miles_core.rollout.embedded.engine import EmbeddedEngine
from miles_core.rollout.engine import GenerateRequest, SamplingParams
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample
from miles_core.weight_sync.bucket import bucketize

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _config(name: str, samples: int, **trainer: object) -> RunConfig:
    options = {"exact": True, "routing_replay": True, "micro_batch_size": samples // 4, **trainer}
    return run_config(name, samples=samples, trainer=options)


def _engine(config: RunConfig, name: str) -> EmbeddedEngine:
    dtype = _DTYPES[config.trainer.precision]
    return EmbeddedEngine(hf_folder(name), dtype=dtype, exact=config.trainer.exact, max_batch_tokens=2048)


def _rollout(engine: EmbeddedEngine, count: int, seed: int, vocab_size: int) -> list[TrainSample]:
    """Prompts of 1 to 40 tokens, responses of up to 80, decoded as many at once as 2,048 tokens of cache allow."""
    rng = np.random.default_rng(seed)
    requests = [
        GenerateRequest(
            str(i),
            rng.integers(4, vocab_size, rng.integers(1, 41)).astype(np.int32),
            SamplingParams(temperature=0.7, max_new_tokens=int(rng.integers(1, 81))),
            seed=seed * count + i,
        )
        for i in range(count)
    ]
    samples = []
    for i, (request, answer) in enumerate(zip(requests, engine.generate(requests), strict=True)):
        length = len(answer.output_ids)
        samples.append(
            TrainSample(
                index=i,
                tokens=np.concatenate([request.prompt_ids, answer.output_ids]),
                response_length=length,
                loss_mask=np.ones(length, dtype=np.uint8),
                loss_weights=np.full(length, 1 / (40 * count), dtype=np.float32),
                advantages=np.full(length, rng.normal(), dtype=np.float32),
                rollout_log_probs=answer.log_probs,
                routed_experts=answer.routed_experts,
            )
        )
    return samples


def _largest_difference(trainer: MegatronTrainer, samples: list[TrainSample]) -> tuple[float, int]:
    found = np.concatenate(trainer.log_probs(samples, "policy"))
    rollout = np.concatenate([s.rollout_log_probs for s in samples])
    assert found.dtype == rollout.dtype == np.float32
    return float(np.abs(found - rollout).max()), len(found)


@pytest.mark.parametrize(
    ("name", "samples", "trainer"),
    [
        ("qwen3", 140, {}),
        ("glm4-moe-mtp", 200, {"packing": False}),
        *((name, 16, {}) for name in MODELS if name != "qwen3" and not name.startswith("deepseek")),
        ("qwen3", 16, {"precision": "bf16"}),
        ("qwen3-moe", 16, {"precision": "bf16"}),
        ("glm4-moe-mtp", 16, {"mtp_loss_scale": 0.2}),
        ("qwen3-moe", 16, {"recompute": "full"}),
    ],
)
def test_log_probs_are_equal_before_and_after_weight_updates(
    name: str, samples: int, trainer: dict[str, object]
) -> None:
    config = _config(name, samples, **trainer)
    engine = _engine(config, name)
    tokens = 0
    with trainer_of(name, config) as ours:
        engine.update_weights(list(bucketize(ours.named_weights(), 2**20)), 0)
        for step in range(2):
            batch = _rollout(engine, samples, step, geometry_of(name).vocab_size)
            difference, count = _largest_difference(ours, batch)
            assert difference == 0.0
            metrics = ours.train_step(batch)
            assert metrics["train/train_rollout_logprob_abs_diff"] == metrics["train/train_rollout_kl"] == 0.0
            assert metrics["train/skipped_steps"] == 0 and metrics["train/grad_norm"] > 0
            tokens += count
            assert not np.array_equal(  # the step did move what the engine is about to serve
                np.concatenate(ours.log_probs(batch, "policy")), np.concatenate([s.rollout_log_probs for s in batch])
            )
            engine.update_weights(list(bucketize(ours.named_weights(), 2**20)), step + 1)
    assert tokens > (10_000 if samples > 100 else 500)


def test_without_exact_mode_they_differ() -> None:
    """The same comparison, so that it is known to be able to fail."""
    config = _config("qwen3", 16, exact=False)
    with trainer_of("qwen3", config) as ours:
        difference, _ = _largest_difference(ours, _rollout(_engine(config, "qwen3"), 16, 0, 101))
    assert 0 < difference < 1e-3


def _difference(trainer: MegatronTrainer, samples: list[TrainSample]) -> float:
    return _largest_difference(trainer, samples)[0]


@pytest.mark.parametrize("parallel", [pytest.param({}, marks=pytest.mark.slow), {"pipeline": 2}])
def test_data_and_pipeline_parallel_ranks_give_the_same_bits(parallel: dict[str, int]) -> None:
    config = _config("glm4-moe", 16, num_ranks=2, parallel=parallel)
    samples = _rollout(_engine(config, "glm4-moe"), 16, 3, 101)
    assert on_ranks("glm4-moe", config, _difference, samples) == [0.0, 0.0]


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latent attention"):
        EmbeddedEngine(hf_folder("deepseek-v3"), exact=True)
    with pytest.raises(ValueError, match="latent attention"), trainer_of("deepseek-v3", _config("deepseek-v3", 16)):
        pass
