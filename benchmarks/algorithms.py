"""Every algorithm on one task: a tiny mixture of experts with random weights learns to sort three digits.

usage: python benchmarks/algorithms.py STORE [ROLLOUTS] [NAME ...]

Runs the stages download to train of the preset `tiny` for each algorithm, in one Ray session; what is in STORE already
is not run again. Distillation's teacher is the model that GRPO gave. Writes benchmarks/results/algorithms.json,
docs/figures/algorithms.svg and docs/algorithms.md.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.cluster.session import local_ray
from miles_core.config.load import load_config
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import read_json_lines
from storage.store import ArtifactStore
from tasks.pipeline import run_single_stage

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "algorithms.json"
BEGIN, END = "<!-- results begin -->", "<!-- results end -->"
WINDOW = 10  # rollouts over which first and last values are averaged
TEACHER = "grpo"

REWARD, EXPLAINED = "rollout/raw_reward", "train/critic-explained_variance"
# What falls instead of the reward's rise, its name for people, and the factor by which it is claimed to fall.
FALLING = {
    "sft": ("train/pg_loss", "loss", 10),
    "distillation": ("train/opd_reverse_kl", "KL to the teacher", 5),
    "distillation_top_k": ("train/distill_loss", "top-k KL to the teacher", 5),
}
LEAST_GAIN, LEAST_EXPLAINED = 0.2, 0.5

# Between the marks of docs/algorithms.md, once there are results.
SECTION = """\
## Each on the same task

The preset `tiny`, a mixture of experts with random weights, learns to sort three digits, {rollouts} rollouts each.
Made by `python benchmarks/algorithms.py STORE`, which ends with an error where one of these does not hold: every
reward rises by 0.2 at least, PPO's critic explains more than half of the variance of the returns, the loss of
supervised fine-tuning falls to under a tenth, and distillation brings the KL between student and teacher to under a
fifth. The teacher is the model that GRPO gave. Values are means of the first and of the last {window} rollouts.

![Reward, loss and explained variance by rollout](figures/algorithms.svg)

{table}
"""


@dataclass(frozen=True)
class Algorithm:
    """One run: what it changes in the preset, and where its formula stands."""

    options: tuple[str, ...]
    formula: str


PLUS_PLUS = ("algorithm.normalize_advantages=true",)
SUPERVISED = (
    "algorithm.advantage_estimator=none", "algorithm.policy_loss=sft", "algorithm.loss_aggregation=token_mean",
    "algorithm.entropy_coef=0", "rollout.n_samples_per_prompt=1", "rollout.batch_size=128",
)  # fmt: skip
DISTILLED = ("algorithm.advantage_estimator=none", "algorithm.entropy_coef=0")
ALGORITHMS = {
    "grpo": Algorithm((), "advantages/grpo.py"),
    "dr_grpo": Algorithm(
        ("algorithm.advantage_estimator=dr_grpo", "algorithm.loss_aggregation=constant"), "advantages/dr_grpo.py"
    ),
    "rloo": Algorithm(("algorithm.advantage_estimator=rloo",), "advantages/rloo.py"),
    "gspo": Algorithm(
        ("algorithm.advantage_estimator=gspo", "algorithm.policy_loss=gspo", "trainer.global_batch_size=64",
         "trainer.micro_batch_size=64"),
        "gspo.py",
    ),
    "cispo": Algorithm(
        ("algorithm.policy_loss=cispo", "algorithm.eps_clip=1.0", "algorithm.eps_clip_high=4.0",
         "trainer.global_batch_size=64", "trainer.micro_batch_size=64"),
        "cispo.py",
    ),
    "reinforce_plus_plus": Algorithm(
        ("algorithm.advantage_estimator=reinforce_plus_plus", *PLUS_PLUS), "advantages/reinforce_plus_plus.py"
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        ("algorithm.advantage_estimator=reinforce_plus_plus_baseline", *PLUS_PLUS),
        "advantages/reinforce_plus_plus.py",
    ),
    "ppo": Algorithm(
        ("algorithm.advantage_estimator=ppo", "algorithm.normalize_advantages=true", "algorithm.gae_lambda=0.95",
         "algorithm.critic_warmup_rollouts=5", "trainer.critic_optimizer.lr=5e-3",
         "trainer.critic_optimizer.warmup_steps=10"),
        "advantages/gae.py, value_loss.py",
    ),
    "dapo": Algorithm(
        ("algorithm.eps_clip_high=0.28", "algorithm.loss_aggregation=token_mean", "algorithm.overlong_buffer=2",
         "rollout.dynamic_sampling=true", "rollout.max_sampling_rounds=50"),
        "dapo.py",
    ),
    "sft": Algorithm(SUPERVISED, "sft.py"),
    "distillation": Algorithm((*DISTILLED, "algorithm.distill_kl_coef=1.0"), "advantages/distillation.py"),
    "distillation_top_k": Algorithm((*DISTILLED, "algorithm.distill_top_k_coef=1.0"), "distillation.py"),
}  # fmt: skip


def configured(name: str, store: Path, rollouts: int, teacher: Path | None) -> RunConfig:
    """The preset `tiny` with the options of an algorithm."""
    options = [*ALGORITHMS[name].options, f"name={name}", f"store.uri={store}", f"rollout.num_rollout={rollouts}"]
    if name.startswith("distillation"):
        options.append(f'distillation.teachers=["{teacher}"]')
    return load_config("tiny", None, options)


def train(config: RunConfig) -> list[dict[str, float]]:
    """The stages up to the training; its metrics of each rollout."""
    for stage in ("download", "convert", "quantize", "train"):
        outcomes = run_single_stage(config, stage)
    store = ArtifactStore(config.store.uri)
    ref = outcomes["train"].ref
    return read_json_lines(store.fetch(ref) / store.manifest(ref).outputs["metrics"])


def exported(config: RunConfig) -> Path:
    """The trained model as a Hugging Face folder."""
    (outcome,) = run_single_stage(config, "export").values()
    return ArtifactStore(config.store.uri).fetch(outcome.ref)


def mean(rows: list[dict[str, float]], metric: str) -> float:
    return sum(row[metric] for row in rows) / len(rows)


def measured(name: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """First and last values of what an algorithm is judged by, and the whole curve of it."""
    found: dict[str, Any] = {}
    for metric in (REWARD, EXPLAINED, *FALLING.get(name, ())[:1]):
        given = [row for row in rows if metric in row]
        if given:
            found[metric] = {
                "first": mean(given[:WINDOW], metric),
                "last": mean(given[-WINDOW:], metric),
                "curve": [round(row[metric], 5) for row in given],
            }
    return found


def failed_claims(results: dict[str, Any]) -> list[str]:
    """What the documentation says of the algorithms and these runs do not show."""
    failed = []
    for name, result in results.items():
        if REWARD in result and result[REWARD]["last"] < result[REWARD]["first"] + LEAST_GAIN:
            failed.append(f"{name}: reward {arrow(result[REWARD])}, a gain of {LEAST_GAIN} is claimed")
        if name in FALLING:
            metric, _, factor = FALLING[name]
            if result[metric]["last"] * factor > result[metric]["first"]:
                failed.append(f"{name}: {metric} {arrow(result[metric])}, a fall to 1/{factor} is claimed")
        if EXPLAINED in result and result[EXPLAINED]["last"] < LEAST_EXPLAINED:
            failed.append(f"{name}: explained variance {arrow(result[EXPLAINED])}, {LEAST_EXPLAINED} is claimed")
    return failed


def draw(results: dict[str, Any], path: Path) -> None:
    """Reward of every algorithm; the loss of SFT and the KL to the teacher; the critic's explained variance."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "algorithms", "font.size": 9})
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), width_ratios=(2, 1, 1), layout="constrained")
    rewards, losses, explained = panels
    colors = plt.get_cmap("tab20").colors
    for color, (name, result) in zip(colors, results.items(), strict=False):
        for axes, metric in ((rewards, REWARD), (losses, FALLING.get(name, ("",))[0]), (explained, EXPLAINED)):
            if metric in result:
                axes.plot(smooth(result[metric]["curve"]), label=name, color=color, linewidth=1.5)
    rewards.set(title="reward of sampled responses", xlabel="rollout")
    losses.set(title="SFT loss, KL to the teacher", xlabel="rollout", yscale="log")
    explained.set(title="PPO: explained variance of the critic", xlabel="rollout", ylim=(-1, 1))
    rewards.legend(ncols=2, fontsize=8, frameon=False)
    losses.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def smooth(curve: list[float]) -> list[float]:
    windows = [curve[max(0, end - WINDOW) : end] for end in range(1, len(curve) + 1)]
    return [sum(window) / len(window) for window in windows]


def table(results: dict[str, Any]) -> str:
    """Markdown: one row an algorithm."""
    lines = ["| algorithm | options on top of the preset | formula | reward | also |", "|-|-|-|-|-|"]
    for name, result in results.items():
        options = "<br>".join(f"`{option}`" for option in ALGORITHMS[name].options) or "none"
        also = f"explained variance {arrow(result[EXPLAINED])}" if EXPLAINED in result else ""
        if name in FALLING:
            metric, label, _ = FALLING[name]
            also = f"{label} {arrow(result[metric])}"
        reward = arrow(result[REWARD]) if REWARD in result else "nothing is sampled"
        lines.append(f"| {name} | {options} | {ALGORITHMS[name].formula} | {reward} | {also} |")
    return "\n".join(lines)


def arrow(values: dict[str, float]) -> str:
    return f"{values['first']:.3f} → {values['last']:.3f}"


def write_docs(results: dict[str, Any], rollouts: int) -> None:
    """Puts figure and table between the marks of docs/algorithms.md."""
    draw(results, ROOT / "docs" / "figures" / "algorithms.svg")
    path = ROOT / "docs" / "algorithms.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    section = SECTION.format(rollouts=rollouts, window=WINDOW, table=table(results))
    path.write_text(f"{before}{BEGIN}\n{section}{END}{after}")


def main(store: Path, rollouts: int, names: list[str]) -> None:
    results: dict[str, Any] = {}
    teacher: Path | None = None
    with local_ray(configured(TEACHER, store, rollouts, None).cluster):
        for name in names:
            if name.startswith("distillation") and teacher is None:
                teacher = exported(configured(TEACHER, store, rollouts, None))
            results[name] = measured(name, train(configured(name, store, rollouts, teacher)))
            shown = {metric: arrow(values) for metric, values in results[name].items()}
            print(name, shown, flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"rollouts": rollouts, "window": WINDOW, "algorithms": results}) + "\n")
    if names == list(ALGORITHMS):
        write_docs(results, rollouts)
    if failed := failed_claims(results):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 200, arguments[2:] or list(ALGORITHMS))
