"""Which option makes which stage run again."""

from pathlib import Path
from typing import Any

import pytest
from run_configs import SMALL, small_config

from miles_core.config.run import RunConfig
from tasks.pipeline import PIPELINE, reuse_of

SPECS = {step.name: step.spec for step in PIPELINE}


def merged(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`base` with the option `path` set."""
    name, _, rest = path.partition(".")
    return {**base, name: merged(base.get(name) or {}, rest, value) if rest else value}


def stages_that_see(before: RunConfig, after: RunConfig) -> set[str]:
    return {spec.stage for spec in SPECS.values() if spec.reads(before) != spec.reads(after)}


@pytest.mark.parametrize(
    ("option", "value", "stages"),
    [
        ("name", "other", set()),
        ("seed", 1, {"train", "evaluate"}),
        ("model.random.seed", 1, {"download"}),
        ("model.mtp_num_layers", 0, {"convert"}),
        ("quantize.format", "fp8", {"quantize", "train", "export"}),
        ("trainer.mtp_loss_scale", 0.2, {"train"}),
        ("data.task.seed", 1, {"train", "evaluate"}),
        ("reward.failure_tolerance", 1, {"train", "evaluate"}),
        ("rollout.num_rollout", 4, {"train"}),
        ("rollout.sampling.temperature", 0.5, {"train"}),
        ("rollout.sampling.max_new_tokens", 5, {"train", "evaluate"}),
        ("algorithm.eps_clip", 0.1, {"train"}),
        ("trainer.optimizer.lr", 1e-3, {"train"}),
        ("trainer.checkpoint.interval", 1, set()),
        ("evaluate.pass_threshold", 0.5, {"evaluate"}),
        ("upload.uri", "/elsewhere", {"upload"}),
        ("store.uri", "/elsewhere", set()),
        ("cluster.num_cpus", 1, set()),
    ],
)
def test_option(tmp_path: Path, option: str, value: Any, stages: set[str]) -> None:
    base = {**SMALL, "store": {"uri": str(tmp_path)}}
    after = RunConfig.model_validate(merged(base, option, value))
    assert stages_that_see(RunConfig.model_validate(base), after) == stages


@pytest.mark.parametrize(("split", "stages"), [("prompts", {"train"}), ("eval_prompts", {"evaluate"})])
def test_prompt_files_count_by_contents(tmp_path: Path, split: str, stages: set[str]) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("prompts", "eval_prompts")}
    for file in files.values():
        file.write_text('{"input": "1", "label": "1"}\n')
    sections = {"data": {name: str(file) for name, file in files.items()}, "reward": {"type": "exact_match"}}
    config = small_config(tmp_path, **sections)
    before = {name: spec.reads(config) for name, spec in SPECS.items()}
    files[split].write_text('{"input": "2", "label": "2"}\n')
    assert {spec.stage for name, spec in SPECS.items() if spec.reads(config) != before[name]} == stages


def test_reward_function_counts_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "my_reward.py"
    module.write_text("def score(prompt, response, label, metadata):\n    return 1.0\n")
    config = small_config(tmp_path, reward={"type": "function", "function": "my_reward:score"})
    before = {name: spec.reads(config) for name, spec in SPECS.items()}
    module.write_text("def score(prompt, response, label, metadata):\n    return 0.0\n")
    changed = {spec.stage for name, spec in SPECS.items() if spec.reads(config) != before[name]}
    assert changed == {"train", "evaluate"}


def test_missing_reward_module_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path, reward={"type": "function", "function": "no_such_module:score"})
    with pytest.raises(ValueError, match=r"reward.function 'no_such_module:score': there is no module no_such_module"):
        SPECS["train"].reads(config)


def test_every_step_takes_from_steps_before_it() -> None:
    names = [step.name for step in PIPELINE]
    for position, step in enumerate(PIPELINE):
        assert set(step.sources.values()) <= set(names[:position])


@pytest.mark.parametrize(
    ("stage", "refresh", "from_stage", "reuse"),
    [
        ("convert", (), None, "complete"),
        ("convert", ("convert",), None, "never"),
        ("convert", (), "train", "required"),
        ("train", (), "train", "never"),
        ("upload", (), "train", "never"),
        ("convert", ("convert",), "train", "never"),
        ("download", (), "download", "never"),
    ],
)
def test_reuse_of(stage: Any, refresh: tuple[Any, ...], from_stage: Any, reuse: str) -> None:
    assert reuse_of(stage, refresh, from_stage) == reuse
