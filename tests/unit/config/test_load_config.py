import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_core.config.faults import option_paths
from miles_core.config.load import ConfigError, describe_fields, load_config, preset_names
from miles_core.config.run import RunConfig

BASE = ("model.random.seed=0", "data.task.name=sort_digits")


def faults_of(*overrides: str, preset: str | None = None, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(preset, file, overrides)
    assert str(error.value).splitlines() == error.value.faults
    return error.value.faults


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads(preset: str) -> None:
    assert load_config(preset, None, []).name == preset


def test_the_expected_presets_are_shipped() -> None:
    assert set(preset_names()) == {"tiny", "smollm2", "qwen3-4b", "qwen3-30b-a3b", "deepseek-v3"}


def test_layers_are_laid_over_each_other(tmp_path: Path) -> None:
    toml, js = tmp_path / "my.toml", tmp_path / "my.json"
    toml.write_text("[rollout]\nnum_rollout = 7\nbatch_size = 32\n")
    js.write_text('{"rollout": {"num_rollout": 7, "batch_size": 32}}')
    preset = load_config("tiny", None, [])
    for file in (toml, js):
        loaded = load_config("tiny", file, ["rollout.batch_size=64", "rollout.sampling.top_p=0.5"])
        assert (loaded.rollout.num_rollout, loaded.rollout.batch_size) == (7, 64)
        assert loaded.rollout.sampling.top_p == 0.5
        assert loaded.rollout.sampling.max_new_tokens == preset.rollout.sampling.max_new_tokens
        assert loaded.trainer == preset.trainer
    assert load_config("tiny", None, []) == preset  # nothing leaks from one call into the next


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=3", "seed", 3),
        ("trainer.optimizer.lr=3e-4", "trainer.optimizer.lr", 3e-4),
        ("trainer.packing=false", "trainer.packing", False),
        ("trainer.global_batch_size=null", "trainer.global_batch_size", None),
        ("rollout.sampling.stop_token_ids=[1, 2]", "rollout.sampling.stop_token_ids", (1, 2)),
        ('data.task.params={"num_digits": 2}', "data.task.params", {"num_digits": 2}),
        ("data.task.params={num_digits = 2}", "data.task.params", {"num_digits": 2}),
        ("data.task.params.num_digits=2", "data.task.params", {"num_digits": 2}),
        ("rollout.engine=sglang", "rollout.engine", "sglang"),
        ("name=7", "name", "7"),  # text stays text, whatever it looks like
        ("name = 'quoted'", "name", "quoted"),
        ("data.label_key=null", "data.label_key", None),
        ("store.uri=s3://bucket/a=b", "store.uri", "s3://bucket/a=b"),
    ],
)
def test_override_values(override: str, path: str, value: Any) -> None:
    loaded: Any = load_config(None, None, [*BASE, override])
    for name in path.split("."):
        loaded = getattr(loaded, name)
    assert loaded == value


def test_a_revision_of_digits_stays_text() -> None:
    loaded = load_config(None, None, ["model.path=hf://a/b", "model.revision=12345678", BASE[1]])
    assert loaded.model.revision == "12345678"


@pytest.mark.parametrize(
    ("preset", "overrides", "set_", "unset"),
    [
        ("tiny", ["model.path=folder"], ("model", "path"), ("model", "random")),
        ("smollm2", ["model.random.num_layers=3"], ("model", "random"), ("model", "path")),
        (
            "tiny",
            ["data.prompts=a.jsonl", "data.eval_prompts=b.jsonl", "reward.type=exact_match"],
            ("data", "prompts"),
            ("data", "task"),
        ),
        ("qwen3-4b", ["data.task.name=sort_digits", "reward.type=task"], ("data", "task"), ("data", "prompts")),
    ],
)
def test_one_alternative_replaces_the_other(
    preset: str, overrides: list[str], set_: tuple[str, str], unset: tuple[str, str]
) -> None:
    loaded = load_config(preset, None, overrides)
    assert getattr(getattr(loaded, set_[0]), set_[1]) is not None
    assert getattr(getattr(loaded, unset[0]), unset[1]) is None


def test_both_alternatives_at_once_are_a_fault() -> None:
    assert faults_of("model.path=x", *BASE) == ["exactly one of model.path and model.random must be set, found both"]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("rollout.num_rollout=0", "rollout.num_rollout = 0: must be at least 1"),
        ("rollout.num_rollout=1.5", "rollout.num_rollout = 1.5: must be a whole number"),
        ("rollout.num_rollout=many", "rollout.num_rollout = 'many': must be a whole number"),
        ("trainer.optimizer.lr=0", "trainer.optimizer.lr = 0: must be greater than 0"),
        ("trainer.optimizer.lr=fast", "trainer.optimizer.lr = 'fast': must be a number"),
        ("trainer.optimizer.beta1=1", "trainer.optimizer.beta1 = 1: must be less than 1"),
        ("rollout.sampling.top_p=2", "rollout.sampling.top_p = 2: must be at most 1"),
        ("model.random.hidden_size=20", "model.random.hidden_size = 20: must be a multiple of 8"),
        ("trainer.precision=fp16", "trainer.precision = 'fp16': must be one of 'fp32' or 'bf16'"),
        ("trainer.packing=7", "trainer.packing = 7: must be true or false"),
        ("rollout.sampling.stop_token_ids=1", "rollout.sampling.stop_token_ids = 1: must be a list"),
        ("rollout.sampling.stop_token_ids=[x]", "rollout.sampling.stop_token_ids = '[x]': must be a list"),
        ("rollout=5", "rollout = 5: must be a table of options"),
        ("name=-", "name = '-': must match the pattern ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        ("name=null", "name = None: must be text"),
        ("model.random.top_k=9", "top_k 9 is larger than num_experts 8"),
        ("trainer.num_ranks", "--set trainer.num_ranks: must be written section.option=value"),
        ("trainer..num_ranks=1", "--set trainer..num_ranks=1: must be written section.option=value"),
    ],
)
def test_each_fault_names_option_value_and_rule(override: str, fault: str) -> None:
    (found,) = faults_of(*BASE, override)
    assert found.startswith(fault)
    assert "pydantic" not in found


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("rollouts.num_rollout", "rollout"),
        ("rollout.bach_size", "rollout.batch_size"),
        ("rollout.sampling.temprature", "rollout.sampling.temperature"),
        ("trainer.optimizer.learning_rate_of_adam", None),
        ("lr", "trainer.optimizer.lr"),
        ("trainer.temperature", "rollout.sampling.temperature"),
        ("data.task.sed", "data.task.seed"),
    ],
)
def test_unknown_options_name_the_nearest(option: str, meant: str | None) -> None:
    hint = f"; did you mean {meant}?" if meant else ""
    top = option.split(".")[0] if option.startswith("rollouts") else option
    assert faults_of(*BASE, f"{option}=1") == [f"unknown option {top}{hint}"]


def test_all_faults_come_in_one_message(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("sed = 1\n[rollout]\nbach_size = 2\n")
    found = faults_of("trainer.optimizer.lr=-1", "nonsense", file=file, preset="tiny")
    assert sorted(found) == [
        "--set nonsense: must be written section.option=value",
        "trainer.optimizer.lr = -1: must be greater than 0",
        "unknown option rollout.bach_size; did you mean rollout.batch_size?",
        "unknown option sed; did you mean seed?",
    ]


def test_what_cannot_be_read_is_one_fault_and_hides_no_other(tmp_path: Path) -> None:
    assert faults_of("seed=-1", preset="tinny")[0].startswith("unknown preset 'tinny', there are deepseek-v3, ")
    assert faults_of("seed=-1", preset="tinny")[0].endswith("; did you mean tiny?")
    assert faults_of("seed=-1", preset="tinny")[1:] == ["seed = -1: must be at least 0"]
    for name, content, fault in (
        ("missing.toml", None, "No such file or directory"),
        ("bad.toml", "a = ", "Invalid value (at end of document)"),
        ("bad.json", "{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("list.json", "[]", "an object is required, found list"),
    ):
        file = tmp_path / name
        if content is not None:
            file.write_text(content)
        assert faults_of(file=file) == [f"configuration file {file}: {fault}"]


def test_required_sections_are_named() -> None:
    assert faults_of() == ["model is required", "data is required"]


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["rollout.num_rollout=2", "trainer.global_batch_size=256"], ["2 rollouts", "8 x", " 8 =", "128", "256"]),
        (["trainer.global_batch_size=48"], ["64", "48", "16 samples of each rollout"]),
        (["trainer.micro_batch_size=48"], ["64", "48 x 1 data-parallel ranks"]),
    ],
)
def test_batch_sizes_that_do_not_divide_show_all_numbers(overrides: list[str], numbers: list[str]) -> None:
    sizes = ["rollout.batch_size=8", "rollout.n_samples_per_prompt=8"]
    (found,) = faults_of(*BASE, *sizes, *overrides)
    for number in numbers:
        assert number in found


def test_cross_checks_of_sections_are_separate_faults() -> None:
    found = faults_of(*BASE, "reward.type=math", "data.label_key=null", "trainer.global_batch_size=7")
    assert len(found) == 2
    assert found[1] == "reward.type=math compares with a label: set data.label_key"


def test_described_fields_are_all_options_with_documentation() -> None:
    rows = {row.path: row for row in describe_fields()}
    assert list(rows) == option_paths(RunConfig)
    assert not [row.path for row in rows.values() if not row.doc]
    assert rows["trainer.optimizer.beta1"].type == "float, >= 0, < 1"
    assert rows["trainer.optimizer.beta1"].default == 0.9
    assert rows["rollout.engine"].type == "embedded | sglang"
    assert rows["model.path"].type == "str | null"
    assert rows["data.task.params"].type == "dict[str, Any]"
    assert rows["rollout.sampling.stop_token_ids"].type == "tuple[int]"
    assert rows["seed"].doc == "Every random choice derives from it."


def test_a_dumped_configuration_validates_again() -> None:
    config = load_config("tiny", None, [])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_loading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from miles_core.config.load import load_config, describe_fields;"
        "load_config('tiny', None, []); describe_fields();"
        "print([m for m in ('torch', 'ray', 'transformers', 'prefect', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
