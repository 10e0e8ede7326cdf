"""The pipeline as it is used, no part replaced: what runs, what is cached, what the server shows of it."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
from conftest import SMALL, Finished, small_config

from conversion.quantization.checkpoint import quantized_in_folder
from conversion.safetensors_header import read_json
from miles_core.config.run import RunConfig
from storage.store import ArtifactStore
from tasks.pipeline import PIPELINE

STEPS = [step.name for step in PIPELINE]
KINDS = {step.name: step.spec.kind for step in PIPELINE}


def folder_of(config: RunConfig, run: Finished, step: str) -> Path:
    """The artifact's folder in the store of `config`."""
    (stage,) = [stage for stage in run.summary.stages if stage.stage == step]
    return Path(config.store.uri, KINDS[step], Path(stage.uri).name)


def test_first_run_runs_everything(first_run: Finished) -> None:
    summary = first_run.summary
    assert [stage.stage for stage in summary.stages] == STEPS
    assert first_run.ran == set(STEPS)
    assert first_run.task_states == dict.fromkeys(STEPS, "Completed")
    assert summary.initial.prompts == summary.final.prompts == 8
    assert Path(summary.paths["model"], "model.safetensors").is_file()
    assert len(Path(summary.paths["metrics"]).read_text().splitlines()) == 3
    assert Path(summary.paths["published"], "lineage.json").is_file()


def test_the_server_shows_training_scores_and_lineage(
    first_run: Finished, artifact_text: Callable[..., list[str]]
) -> None:
    assert artifact_text("training-small", first_run)[-1] == "100"
    assert "data:image/svg+xml;base64," in artifact_text("reward-curve-small", first_run)[-1]
    assert "mean_reward" in artifact_text("evaluation-small", first_run)[0]
    (lineage,) = artifact_text("lineage-small", first_run)
    for stage in first_run.summary.stages:
        assert f"({'file://' + stage.uri}) | `{stage.digest}`" in lineage


def test_the_ui_of_a_temporary_server_asks_that_server(prefect_api: str) -> None:
    with urllib.request.urlopen(prefect_api.removesuffix("/api") + "/ui-settings") as answer:
        assert json.load(answer)["api_url"] == prefect_api


def test_same_run_again_is_cached(
    run: Callable[..., Finished], config: RunConfig, artifact_text: Callable[..., list[str]]
) -> None:
    again = run(config)
    assert again.ran <= {"upload"}  # the copy of the store publishes nothing
    assert {again.task_states[name] for name in STEPS if name != "upload"} == {"Cached"}
    assert artifact_text("lineage-small", again)[-1].count("| cached |") == len(STEPS) - 1


def test_dependencies_of_cached_steps_are_known_to_the_server(run: Callable[..., Finished], config: RunConfig) -> None:
    from prefect import get_client

    run(config)
    with get_client(sync_client=True) as client:
        task_runs = sorted(client.read_task_runs(), key=lambda task_run: task_run.created or 0)[-len(STEPS) :]
    by_id = {task_run.id: task_run.name for task_run in task_runs}
    for task_run in task_runs:
        (step,) = [step for step in PIPELINE if step.name == task_run.name]
        parents = {by_id[parent.id] for parent in task_run.task_inputs["inputs"] if hasattr(parent, "id")}
        assert parents == set(step.sources.values())


@pytest.mark.parametrize("step", [name for name in STEPS if name not in ("train", "upload")])
def test_deleted_artifact_is_made_again_alone(
    run: Callable[..., Finished], first_run: Finished, config: RunConfig, step: str
) -> None:
    run(config)
    shutil.rmtree(folder_of(config, first_run, step))
    assert run(config).ran == {step}


def test_an_int4_run_rolls_out_evaluates_and_exports_what_it_trains(
    run: Callable[..., Finished], tmp_path: Path
) -> None:
    config = small_config(
        tmp_path / "store",
        quantize={"format": "int4_linear", "group_size": 16},
        trainer={**SMALL["trainer"], "qat": True},
    )
    finished = run(config)
    assert finished.ran == set(STEPS)
    metrics = [json.loads(line) for line in Path(finished.summary.paths["metrics"]).read_text().splitlines()]
    # The engine decodes the same values that the trainer multiplies with: what remains is fp32 rounding.
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in metrics) < 1e-5
    masters, packed = (folder_of(config, finished, step) for step in ("export", "export-quantized"))
    assert quantized_in_folder(masters) == frozenset()
    assert len(quantized_in_folder(packed)) > 20
    assert (
        read_json(packed / "config.json")["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    )


def test_refresh_runs_a_stage_again_and_equal_results_keep_the_rest(
    run: Callable[..., Finished], config: RunConfig
) -> None:
    run(config)
    assert run(config, refresh=("convert",)).ran == {"convert"}


def test_from_stage_runs_it_and_all_after_it(run: Callable[..., Finished], config: RunConfig) -> None:
    assert run(config, from_stage="export").ran == set(STEPS[STEPS.index("export") :])


def test_from_stage_needs_what_lies_before(run: Callable[..., Finished], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the result of stage download is not in .*: run download first"):
        run(small_config(tmp_path / "empty"), from_stage="train")


def test_two_equal_runs_at_once_do_the_work_once(
    run: Callable[..., Finished], first_run: Finished, config: RunConfig
) -> None:
    gone = {"convert", "export"}
    for step in gone:
        shutil.rmtree(folder_of(config, first_run, step))
    with ThreadPoolExecutor(2) as pool:
        # In the context of this thread, which says where Prefect's server is.
        runs = [future.result() for future in [pool.submit(copy_context().run, run, config) for _ in range(2)]]
    assert sorted(name for finished in runs for name in finished.ran - {"upload"}) == sorted(gone)


ALL_CACHED = """
import sys
from flows.direct import run_here
from flows.server import start
from miles_core.config.run import RunConfig

config = RunConfig.model_validate_json(sys.argv[1])
summary = run_here(config, server=start())
assert all(stage.cached for stage in summary.stages), summary
print(sorted({"torch", "ray", "transformers", "megatron"} & set(sys.modules)))
"""


def test_cached_run_as_a_process_loads_nothing_heavy(run: Callable[..., Finished], config: RunConfig) -> None:
    run(config)
    command = [sys.executable, "-c", ALL_CACHED, config.model_dump_json()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_artifacts_of_the_run_verify(first_run: Finished) -> None:
    store = ArtifactStore(str(Path(first_run.summary.paths["model"]).parents[1]))
    for entry in store.ls():
        ref = store.find(entry.kind, entry.key)
        assert ref is not None, entry
        store.verify(ref)
