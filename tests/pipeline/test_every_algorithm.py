"""Each algorithm through download, convert, quantize and train, on a local Ray."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.cluster.session import local_ray
from miles_core.config.load import load_config
from miles_core.config.run import ClusterConfig, RunConfig
from miles_core.observability.metrics import read_json_lines
from storage.store import ArtifactStore
from tasks.pipeline import run_single_stage

pytestmark = pytest.mark.slow

ROLLOUTS = 3
NO_REWARD = ("algorithm.advantage_estimator=none", "algorithm.entropy_coef=0")
SUPERVISED = (*NO_REWARD, "algorithm.policy_loss=sft", "rollout.n_samples_per_prompt=1", "rollout.batch_size=128")
ALGORITHMS = {
    "grpo": (),
    "dr_grpo": ("algorithm.advantage_estimator=dr_grpo", "algorithm.loss_aggregation=constant"),
    "rloo": ("algorithm.advantage_estimator=rloo", "algorithm.kl_loss_coef=0.01"),
    "gspo": ("algorithm.advantage_estimator=gspo", "algorithm.policy_loss=gspo"),
    "cispo": ("algorithm.policy_loss=cispo",),
    "reinforce_plus_plus": (
        "algorithm.advantage_estimator=reinforce_plus_plus",
        "algorithm.normalize_advantages=true",
        "algorithm.kl_coef=0.01",
    ),
    "reinforce_plus_plus_baseline": (
        "algorithm.advantage_estimator=reinforce_plus_plus_baseline",
        "algorithm.normalize_advantages=true",
    ),
    "ppo": ("algorithm.advantage_estimator=ppo", "algorithm.gae_lambda=0.95"),
    "dapo": (
        "algorithm.eps_clip_high=0.28",
        "algorithm.loss_aggregation=token_mean",
        "algorithm.overlong_buffer=2",
        "rollout.dynamic_sampling=true",
    ),
    "sft": SUPERVISED,
    "distillation": (*NO_REWARD, "algorithm.distill_kl_coef=1.0"),
    "distillation_top_k": (*NO_REWARD, "algorithm.distill_top_k_coef=1.0"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with local_ray(ClusterConfig(num_cpus=2)):
        yield tmp_path_factory.mktemp("store")


def configured(store: Path, *options: str) -> RunConfig:
    return load_config("tiny", None, [*options, f"store.uri={store}", f"rollout.num_rollout={ROLLOUTS}"])


def train(config: RunConfig) -> tuple[list[dict[str, float]], dict[str, object]]:
    """Metrics of each rollout, and the artifact's account."""
    for stage in ("download", "convert", "quantize", "train"):
        outcomes = run_single_stage(config, stage)
    store, ref = ArtifactStore(config.store.uri), outcomes["train"].ref
    manifest = store.manifest(ref)
    return read_json_lines(store.fetch(ref) / manifest.outputs["metrics"]), manifest.account


@pytest.fixture(scope="module")
def teacher(store: Path) -> Path:
    """Another model with the same tokenizer."""
    config = configured(store, "model.random.seed=1")
    (outcome,) = run_single_stage(config, "download").values()
    return ArtifactStore(config.store.uri).fetch(outcome.ref)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_trains(store: Path, teacher: Path, name: str) -> None:
    options = ALGORITHMS[name]
    if name.startswith("distillation"):
        options = (*options, f'distillation.teachers=["{teacher}"]')
    rows, account = train(configured(store, *options))
    assert len(rows) == ROLLOUTS
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["train/skipped_steps"] == 0
    if name != "sft":
        assert rows[0]["train/ppo_kl"] == 0.0 and rows[0]["train/pg_clipfrac"] == 0.0
        assert rows[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert rows[0]["train/routing_replay_overlap"] > 0.99
    expected = {
        "ppo": ("train/critic-value_loss", "train/critic-explained_variance", "train/critic-value_clipfrac"),
        "dapo": ("rollout/dynamic_filter/dropped_groups",),
        "distillation": ("train/opd_reverse_kl",),
        "distillation_top_k": ("train/distill_loss",),
        "sft": ("rollout/epoch",),
    }
    for metric in expected.get(name, ()):
        assert metric in rows[0]
    assert (account["reward_last_10"] is None) == (name == "sft")


def test_several_steps_a_rollout_move_the_ratio(store: Path) -> None:
    rows, _ = train(configured(store, "trainer.global_batch_size=64", "trainer.micro_batch_size=64"))
    assert rows[0]["train/ppo_kl"] != 0.0 and rows[0]["train/skipped_steps"] == 0
