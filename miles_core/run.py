"""The composition root: a TrainSpec in, a committed train artifact out. The only place that knows every part."""

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from miles_core.config.run import RunConfig
from miles_core.observability.metrics import (
    ConsoleLine,
    JsonLines,
    OnMetrics,
    Report,
    Sink,
    TensorBoard,
    read_json_lines,
)
from storage.manifest import ArtifactRef
from storage.store import ArtifactStore

KIND = "train"
METRICS_FILE = "metrics.jsonl"
WEIGHTS_FILE = "weights.json"
# What differs between equal runs: clocks, and the bytes (not the tensors) of checkpoints. weights.json stands for them.
VOLATILE = ("checkpoints/**", METRICS_FILE, "tensorboard/**")


class TrainSpec(BaseModel):
    """Everything the training loop needs, small enough to be an environment variable of a cluster job."""

    model_config = ConfigDict(frozen=True)

    config: RunConfig
    key: str
    model: ArtifactRef  # torch_dist
    rollout_model: ArtifactRef  # Hugging Face folder in the rollout's number format

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.config.store.uri, self.config.store.endpoint_url)


def train(spec: TrainSpec, on_metrics: OnMetrics) -> ArtifactRef:
    """Trains, or goes on training, and commits the result under `spec.key`. Ray must be running.

    `on_metrics` gets every rollout's metrics in order, those of an earlier attempt included.
    """
    store = spec.store
    if (ready := store.find(KIND, spec.key)) is not None:
        return ready
    work = store.work_dir(KIND, spec.key)
    final, account = _loop(spec, store, work, on_metrics)
    rows = read_json_lines(work / METRICS_FILE)
    rewards = [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    return store.commit(
        KIND,
        spec.key,
        stage="train",
        inputs={"model": spec.model.digest, "rollout_model": spec.rollout_model.digest},
        outputs={"checkpoint": str(final.relative_to(work)), "metrics": METRICS_FILE},
        config=spec.config.model_dump(mode="json"),
        account={
            **account,
            "rollouts": len(rows),
            "samples": len(rows) * spec.config.samples_per_rollout,
            "reward_first_10": _mean(rewards[:10]),
            "reward_last_10": _mean(rewards[-10:]),
            "loss_first_10": _mean(losses[:10]),
            "loss_last_10": _mean(losses[-10:]),
        },
        volatile=VOLATILE,
    )


def _loop(spec: TrainSpec, store: ArtifactStore, work: Path, on_metrics: OnMetrics) -> tuple[Path, dict[str, Any]]:
    # Imported here: a spec can be made, and its artifact found, without torch and Ray.
    from conversion.families import geometry_from_config
    from conversion.quantization.checkpoint import quantized_in_folder
    from conversion.quantization.formats import require_format
    from miles_core.checkpoint import MARKER, CheckpointFolder
    from miles_core.cluster.rollout_group import RolloutGroup
    from miles_core.cluster.teacher_process import TeacherGroup
    from miles_core.cluster.train_group import TrainGroup
    from miles_core.cluster.weight_push import WeightPush
    from miles_core.controller import Controller
    from miles_core.data.tokenization import load_tokenizer
    from miles_core.rollout.collectors import build_collector, load_training_data, samples_anew
    from miles_core.rollout.saved import saved_rollouts

    config = spec.config
    model_folder, rollout_folder = store.fetch(spec.model), store.fetch(spec.rollout_model)
    model_config = json.loads((rollout_folder / "config.json").read_text())
    require_format(model_config.get("quantization_config"), config.quantize.format, config.quantize.group_size)
    geometry = geometry_from_config(model_config)
    tokenizer = load_tokenizer(rollout_folder)
    data = load_training_data(config, tokenizer, geometry.max_position)
    for warning in config.warnings():
        Console(stderr=True, highlight=False).print(f"warning: {warning}", soft_wrap=True)

    store.sync_down(KIND, spec.key, "checkpoints")
    checkpoints = CheckpointFolder(
        work / "checkpoints",
        config.trainer.checkpoint.keep,
        attachments=(work / METRICS_FILE,),
        publish=lambda: store.sync_up(KIND, spec.key, "checkpoints", marker=MARKER),
    )
    first, _ = checkpoints.latest() or (0, {})
    earlier = read_json_lines(checkpoints.folder(first) / METRICS_FILE) if first else []
    # Rollouts past the checkpoint run again, so what was recorded of them goes.
    sinks: list[Sink] = [JsonLines(work / METRICS_FILE), TensorBoard(work / "tensorboard"), Report(on_metrics)]
    for row in earlier:
        rollout_id = int(row.pop("rollout_id"))
        for sink in sinks:
            sink.write(rollout_id, row)
    sinks.append(ConsoleLine(config.rollout.num_rollout))
    with ExitStack() as opened:
        for sink in sinks:
            opened.callback(sink.close)
        trainer = opened.enter_context(closing(TrainGroup(config, geometry, model_folder)))
        engines = weights = teacher = None
        if samples_anew(config):
            engines = opened.enter_context(closing(RolloutGroup(config, rollout_folder)))
            weights = WeightPush(config, trainer, engines, quantized_in_folder(rollout_folder))
        if config.algorithm.needs_teacher:
            teacher = opened.enter_context(closing(TeacherGroup(config, rollout_folder)))
        final = Controller(
            config=config,
            collector=build_collector(config, data, tokenizer, rollout_folder, engines.generate if engines else None),
            trainer=trainer,
            weights=weights,
            checkpoints=checkpoints,
            sinks=sinks,
            teacher=teacher,
            saved=saved_rollouts(config, rollout_folder),
        ).run()
        digests = trainer.weight_digests()
    (work / WEIGHTS_FILE).write_text(json.dumps(digests, indent=0, sort_keys=True))
    return final, {"data": data.account, "resumed_from_rollout": first}


def _mean(values: list[float]) -> float | None:
    """None where there are none: supervised fine-tuning has no rewards."""
    return sum(values) / len(values) if values else None
