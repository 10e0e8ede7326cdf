"""Rollouts without training: what the initial model answers, saved for `debug.load_rollouts` or to be looked at."""

import json
from contextlib import ExitStack, closing
from pathlib import Path

from miles_core.config.run import RunConfig
from miles_core.observability.metrics import ConsoleLine, JsonLines, Sink

METRICS_FILE = "metrics.jsonl"


def sample_rollouts(config: RunConfig, model_folder: Path) -> Path:
    """Samples and scores `rollout.num_rollout` rollouts of a Hugging Face folder. Ray must be running.

    Returns the folder `debug.save_rollouts`, which also gets the rollouts' metrics as metrics.jsonl.
    """
    from conversion.families import geometry_from_config
    from miles_core.cluster.rollout_group import RolloutGroup
    from miles_core.data.tokenization import load_tokenizer
    from miles_core.rollout.collectors import build_collector, load_training_data
    from miles_core.rollout.saved import folder_weights_digest, saved_rollouts

    saved = saved_rollouts(config, model_folder)
    assert saved is not None, "debug.save_rollouts says where to"
    tokenizer = load_tokenizer(model_folder)
    geometry = geometry_from_config(json.loads((model_folder / "config.json").read_text()))
    data = load_training_data(config, tokenizer, geometry.max_position)
    weights = folder_weights_digest(model_folder)
    saved.folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonLines(saved.folder / METRICS_FILE), ConsoleLine(config.rollout.num_rollout)]
    with ExitStack() as opened:
        for sink in sinks:
            opened.callback(sink.close)
        engines = opened.enter_context(closing(RolloutGroup(config, model_folder)))
        collector = build_collector(config, data, tokenizer, model_folder, engines.generate)
        for rollout_id in range(config.rollout.num_rollout):
            groups, metrics = collector.collect()
            saved.save(rollout_id, groups, weights)
            for sink in sinks:
                sink.write(rollout_id, metrics)
    return saved.folder
