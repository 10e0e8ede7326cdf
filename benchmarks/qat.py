"""What INT4 costs a model that was trained for it, and one that was not.

usage: python benchmarks/qat.py STORE [ROLLOUTS]

The preset `tiny`, with layers as wide as one INT4 group of 128, learns to sort three digits, with GRPO, in three ways:
in full precision; with INT4 rollouts alone; with INT4 rollouts and quantization-aware training. Every linear layer is
INT4 (quantize.format=int4_linear). Each trained model is scored on held-out prompts as it was trained and rounded to
INT4. Runs that are in STORE already are not run again. Writes benchmarks/results/qat.json; ends with an error if the
aware model loses more than two points.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from conversion.quantization.checkpoint import quantize_folder
from miles_core.cluster.session import local_ray
from miles_core.config.load import load_config
from miles_core.config.run import RunConfig
from miles_core.evaluation import evaluate
from miles_core.observability.metrics import read_json_lines
from storage.progress import no_progress
from storage.store import ArtifactStore
from tasks.pipeline import run_single_stage

OUT = Path(__file__).parent / "results" / "qat.json"
FORMAT, ALLOWED_LOSS = "int4_linear", 0.02
WAYS: dict[str, tuple[str, ...]] = {
    "full precision": (),
    "int4 rollout": (f"quantize.format={FORMAT}", "algorithm.off_policy.method=tis"),
    "int4 rollout and qat": (f"quantize.format={FORMAT}", "trainer.qat=true"),
}
MISMATCH = "train/train_rollout_logprob_abs_diff"


# The larger a group, the coarser its grid: one outlier decides the step of all its weights.
MODEL = (
    "model.random.hidden_size=128", "model.random.head_dim=32", "model.random.ffn_hidden_size=128",
    "model.random.moe_ffn_hidden_size=128", "model.random.num_experts=4", "quantize.group_size=128",
)  # fmt: skip


def configured(options: tuple[str, ...], store: Path, rollouts: int) -> RunConfig:
    common = [f"store.uri={store}", f"rollout.num_rollout={rollouts}", "data.task.eval_size=400"]
    return load_config("tiny", None, [*common, *MODEL, *options])


def trained(config: RunConfig) -> tuple[list[dict[str, float]], Path]:
    """Metrics of every rollout, and the exported model in full precision."""
    for stage in ("download", "convert", "quantize"):
        run_single_stage(config, stage)
    store = ArtifactStore(config.store.uri)
    train = run_single_stage(config, "train")["train"].ref
    rows = read_json_lines(store.fetch(train) / store.manifest(train).outputs["metrics"])
    return rows, store.fetch(run_single_stage(config, "export")["export"].ref)


def score(config: RunConfig, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        report = evaluate(config, folder, Path(out), no_progress)
    return {name: report[name] for name in ("mean_reward", "accuracy")}


def measured(config: RunConfig) -> dict[str, Any]:
    rows, full = trained(config)
    with tempfile.TemporaryDirectory() as rounded:
        quantize_folder(full, Path(rounded), FORMAT, config.quantize.group_size)
        scores = {"full": score(config, full), "int4": score(config, Path(rounded))}
    return {
        **scores,
        "loss": scores["full"]["mean_reward"] - scores["int4"]["mean_reward"],
        "reward_last_10": sum(row["rollout/raw_reward"] for row in rows[-10:]) / 10,
        "mismatch_last_10": sum(row[MISMATCH] for row in rows[-10:]) / 10,
    }


def main(store: Path, rollouts: int) -> None:
    results: dict[str, Any] = {}
    with local_ray(configured((), store, rollouts).cluster):
        for name, options in WAYS.items():
            results[name] = measured(configured(options, store, rollouts))
            print(name, results[name], flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"rollouts": rollouts, "format": FORMAT, **results}) + "\n")
    print("| trained with | reward in full precision | in INT4 | lost | log-probs off by |\n|-|-|-|-|-|")
    for name, r in results.items():
        full, int4 = (f"{r[kind]['mean_reward']:.3f}" for kind in ("full", "int4"))
        print(f"| {name} | {full} | {int4} | {r['loss']:+.3f} | {r['mismatch_last_10']:.2g} |")
    if (lost := results["int4 rollout and qat"]["loss"]) > ALLOWED_LOSS:
        sys.exit(f"the model that was trained for INT4 loses {lost:.3f} in it, allowed are {ALLOWED_LOSS}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 300)
