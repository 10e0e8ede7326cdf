import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import DeepseekV3Config

from conversion.random_model import make_random_model
from miles_core.config import preflight as module
from miles_core.config.load import ConfigError, load_config
from miles_core.config.model import RandomModelConfig
from miles_core.config.preflight import preflight


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, **RandomModelConfig().model_dump())
    return folder


@pytest.fixture
def model(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def faults_of(*overrides: str, preset: str = "tiny") -> list[str]:
    return preflight(load_config(preset, None, overrides)).faults


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("preset", ["tiny", "smollm2"])
def test_presets_for_any_machine_have_no_fault(preset: str) -> None:
    report = preflight(load_config(preset, None, []))
    assert report.faults == []


def test_a_sound_folder_has_no_fault(model: Path) -> None:
    assert faults_of(f"model.path={model}", "model.mtp_num_layers=1", "data.apply_chat_template=true") == []
    assert faults_of(f"model.path={model}", "quantize.format=int4", "quantize.group_size=32") == []


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "overrides", "fault"),
    [
        (shutil.rmtree, [], "no such folder (a model of the Hugging Face Hub is written hf://ORGANISATION/NAME)"),
        (lambda f: (f / "config.json").unlink(), [], "lacks config.json"),
        (lambda f: (f / "config.json").write_text("{"), [], "config.json is no valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), [], "has no weights"),
        (_truncated, [], "is truncated"),
        (lambda f: edit_config(f, architectures=["MambaForCausalLM"]), [], "no model family for MambaForCausalLM"),
        (_without_tokenizer, [], "has no tokenizer"),
        (_without_template, ["data.apply_chat_template=true"], "has no chat template"),
        (None, ["model.mtp_num_layers=2"], "model.mtp_num_layers 2, but the model has 1 MTP layer"),
        (
            None,
            ["model.mtp_num_layers=0", "trainer.mtp_loss_scale=0.2"],
            "trainer.mtp_loss_scale 0.2 trains MTP layers, but model.mtp_num_layers 0 leaves none of them",
        ),
        (
            None,
            ["data.max_prompt_length=510", "rollout.sampling.max_new_tokens=4"],
            "data.max_prompt_length 510 + rollout.sampling.max_new_tokens 4 = 514 tokens, but the model takes 512",
        ),
        (None, ["quantize.format=int4"], "is no multiple of the group size 128 of int4 (quantize.group_size)"),
    ],
)
def test_faults_of_a_model_folder(
    model: Path, damage: Callable[[Path], object] | None, overrides: list[str], fault: str
) -> None:
    if damage is not None:
        damage(model)
    (found,) = faults_of(f"model.path={model}", *overrides)
    assert fault in found


def test_a_random_model_is_checked_like_a_folder() -> None:
    found = faults_of("quantize.format=int4", "model.mtp_num_layers=2", "data.max_prompt_length=64")
    assert [fault.split(" ")[0] for fault in found] == ["model.mtp_num_layers", "data.max_prompt_length", "tensor"]


def test_training_mtp_layers_needs_some() -> None:
    (fault,) = faults_of("model.random.num_mtp_layers=0", "trainer.mtp_loss_scale=0.2")
    assert fault.startswith("trainer.mtp_loss_scale 0.2 trains MTP layers, but Glm4MoeForCausalLM has none: set")


def test_groups_must_lie_on_one_tensor_parallel_rank() -> None:
    options = ("quantize.format=int4_linear", "trainer.qat=true", "trainer.num_ranks=2", "trainer.parallel.tensor=2")
    (fault,) = faults_of(*options, "quantize.group_size=32", "model.random.moe_ffn_hidden_size=32")
    assert "cuts groups of 32 in model.layers.1.mlp.shared_experts.down_proj.weight of width 32" in fault
    assert faults_of(*options, "quantize.group_size=16") == []


def test_hub_paths_are_checked_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert faults_of("model.path=hf://org/name") == []
    assert faults_of("model.path=hf://name") == ["model.path 'hf://name' must be written hf://ORGANISATION/NAME"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (fault,) = faults_of("model.path=hf://org/name")
    assert "is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it" in fault


def test_a_cached_hub_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    refs = tmp_path / "hub/models--org--name/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (fault,) = faults_of("model.path=hf://org/name")
    assert "no model family for MambaForCausalLM" in fault


def test_every_fault_of_prompt_files_reward_and_task_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"input": "1", "label": 1}\n{"input": \n{"label": 1}\n')
    (tmp_path / "eval.jsonl").write_text("")
    found = faults_of(
        "data.prompts=train.jsonl",
        "data.eval_prompts=eval.jsonl",
        "reward.type=function",
        "reward.function=no_such_module:score",
    )
    assert [fault.split(": ")[0] for fault in found[:2]] == ["train.jsonl:2", "train.jsonl:3"]
    assert found[2:] == [
        "eval.jsonl holds no rows: one JSON object a line is required",
        "reward.function 'no_such_module:score': there is no module no_such_module",
    ]
    assert "must be written package.module:name" in faults_of("reward.type=function", "reward.function=score")[0]
    assert "has no data set 'chain_sums'" in faults_of("data.task.name=reasoning_gym/chain_sums")[0]
    assert "lower a size" in faults_of("data.task.train_size=1000")[0]


def test_a_reward_function_in_the_working_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("raise RuntimeError('not to be run')\n")
    assert faults_of("reward.type=function", "reward.function=my_reward:score") == []


def test_stores_that_cannot_be_written_name_their_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    (tmp_path / "file").write_text("")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        found = faults_of("store.uri=file/store", "upload.uri=s3://bucket/models", f"upload.endpoint_url={endpoint}")
    assert len(found) == 2
    assert "'file' is a file" in found[0].replace(str(tmp_path) + "/", "")
    assert "store.uri" in found[0]
    assert f"'s3://bucket/models' at '{endpoint}' does not answer as an S3 server" in found[1]
    assert "upload.endpoint_url" in found[1]


def test_packages_are_asked_for_where_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    chosen = ["rollout.engine=sglang", "data.task.name=reasoning_gym/chain_sum", "reward.type=math"]
    assert faults_of(*chosen) == [
        "rollout.engine=sglang needs the package sglang: pip install 'miles-on-prefect[sglang]'",
        "data.task.name=reasoning_gym/chain_sum needs the package reasoning_gym: pip install 'miles-on-prefect[train]'",
        "reward.type=math needs the package math_verify: pip install 'miles-on-prefect[train]'",
    ]
    assert faults_of(*chosen, "cluster.address=http://head:8265") == []
    assert faults_of() == []


@pytest.mark.parametrize(
    ("gpus", "overrides", "warned"),
    [
        (0, [], []),
        (0, ["trainer.precision=bf16"], ["trainer.precision=bf16 without a GPU"]),
        (
            0,
            ["trainer.num_ranks=8", "trainer.micro_batch_size=1", "cluster.num_cpus=4"],
            ["trainer.num_ranks 8 on 4 CPUs"],
        ),
        (1, [], ["trainer.precision=fp32 on a GPU"]),
        (
            2,
            ["trainer.num_ranks=4", "trainer.micro_batch_size=1", "trainer.precision=bf16"],
            ["trainer.num_ranks 4 on 2 GPUs"],
        ),
        (0, ["trainer.precision=bf16", "cluster.address=http://head:8265"], []),
    ],
)
def test_warnings_about_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, overrides: list[str], warned: list[str]
) -> None:
    monkeypatch.setattr(module.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(gpus)])
    report = preflight(load_config("tiny", None, overrides))
    assert report.faults == []
    assert [w for w, start in zip(report.warnings, warned, strict=True) if not w.startswith(start)] == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer.num_ranks=2", "trainer.parallel.tensor=2"], "trainer.parallel.tensor 2"),
        (
            ["trainer.num_ranks=2", "trainer.micro_batch_size=8", "trainer.parallel.expert=2"],
            "trainer.parallel.expert 2",
        ),
        (["trainer.num_ranks=2", "trainer.parallel.context=2"], "trainer.parallel.context 2"),
        (["rollout.engine=sglang"], "rollout.engine=sglang"),
        (["trainer.fp8=true"], "trainer.fp8=true"),
        (["quantize.format=int4", "trainer.qat=true"], "trainer.qat=true"),
        (["quantize.format=int4"], "quantize.format=int4"),
        (["trainer.routing_replay=false"], "trainer.routing_replay=false"),
    ],
)
def test_exact_mode_refuses_what_would_break_it(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("tiny", None, ["trainer.exact=true", *overrides])
    assert [fault for fault in error.value.faults if "trainer.exact=true" in fault and named in fault]
    load_config("tiny", None, overrides)


def test_exact_mode_refuses_models_and_machines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    exact = (f"model.path={model}", "trainer.exact=true")
    assert faults_of(*exact) == []
    file = model / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    (fault,) = faults_of(*exact)
    assert "precision=fp32" in fault and "bfloat16" in fault and "precision=bf16" in fault
    assert faults_of(*exact, "trainer.precision=bf16") == []
    monkeypatch.setattr(module.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert any("1 GPUs: set trainer.exact=false" in fault for fault in faults_of(*exact, "trainer.precision=bf16"))
    DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=4).save_pretrained(model)
    assert any("latent attention" in fault for fault in faults_of(*exact, "trainer.precision=bf16"))


def test_preflight_imports_nothing_heavy(model: Path) -> None:
    code = (
        "import sys; from miles_core.config.load import load_config; from miles_core.config.preflight import preflight;"
        f"report = preflight(load_config('tiny', None, ['model.path={model}', 'quantize.format=fp8']));"
        "assert not report.faults, report.faults;"
        "print([m for m in ('torch', 'ray', 'transformers', 'prefect') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
