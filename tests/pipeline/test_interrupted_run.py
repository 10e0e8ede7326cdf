"""The run as a user sees it: killed in mid-training and started again; its model in other hands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROLLOUTS, CHECKPOINT_EVERY, KILL_AFTER = 9, 2, 5
MILES = [sys.executable, "-m", "flows.cli.app"]


def command(store: Path) -> list[str]:
    options = [
        f"rollout.num_rollout={ROLLOUTS}",
        f"trainer.checkpoint.interval={CHECKPOINT_EVERY}",
        f"store.uri={store}",
        "data.task.train_size=64",
        "data.task.eval_size=32",
        "upload.uri=null",
    ]
    return [*MILES, "run", "--preset", "tiny", "--json", *(part for o in options for part in ("--set", o))]


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1", "HOME": str(home)}


def metrics_of(store: Path) -> list[dict]:
    files = list(store.glob("train/*/metrics.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines() if line.endswith("}")] if files else []


def finish(store: Path, home: Path) -> dict:
    result = subprocess.run(command(store), env=environment(home), capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, home) -> dict:
    return finish(tmp_path_factory.mktemp("whole"), home)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, home) -> tuple[Path, dict]:
    """A store whose run was killed after some rollouts, and the summary of the run that went on."""
    store = tmp_path_factory.mktemp("killed")
    process = subprocess.Popen(command(store), env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while len(metrics_of(store)) < KILL_AFTER:
        assert process.poll() is None, process.stderr.read()[-4000:]
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return store, finish(store, home)


def artifact(summary: dict, stage: str) -> Path:
    return Path(next(s["uri"] for s in summary["stages"] if s["stage"] == stage))


@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_from_its_checkpoint(killed) -> None:
    store, summary = killed
    cached = {s["stage"]: s["cached"] for s in summary["stages"]}
    assert [name for name, hit in cached.items() if hit] == ["download", "convert", "quantize"]
    account = json.loads((artifact(summary, "train") / "MANIFEST.json").read_text())["account"]
    assert CHECKPOINT_EVERY <= account["resumed_from_rollout"] < ROLLOUTS
    assert [row["rollout_id"] for row in metrics_of(store)] == list(range(ROLLOUTS))


@pytest.mark.timeout(600)
def test_its_weights_equal_those_of_an_uninterrupted_run_bit_for_bit(killed, uninterrupted) -> None:
    from conversion.inspect import diff_checkpoints

    diff = diff_checkpoints(artifact(killed[1], "export"), artifact(uninterrupted, "export"))
    assert diff.rows and not diff.different
    before = diff_checkpoints(artifact(uninterrupted, "export"), artifact(uninterrupted, "download"))
    assert before.different, "training changed nothing"
    names = ("rollout/raw_reward", "train/loss", "train/grad_norm")
    ours, theirs = (metrics_of(artifact(s, "train").parents[1]) for s in (killed[1], uninterrupted))
    assert [[row[n] for n in names] for row in ours] == [[row[n] for n in names] for row in theirs]


@pytest.mark.timeout(600)
def test_every_push_had_equal_digests_and_replay_agreed(uninterrupted) -> None:
    rows = metrics_of(artifact(uninterrupted, "train").parents[1])
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-5
    assert all(row["train/routing_replay_overlap"] > 0.99 for row in rows)
    assert all(row["train/ppo_kl"] == 0.0 for row in rows)


@pytest.mark.timeout(600)
def test_transformers_loads_the_export_and_decodes_as_the_engine_does(uninterrupted) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from miles_core.rollout.embedded.engine import EmbeddedEngine
    from miles_core.rollout.engine import GenerateRequest, SamplingParams

    folder = artifact(uninterrupted, "export")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = np.random.default_rng(0)
    texts = ["".join(map(str, rng.integers(0, 10, rng.integers(1, 9)))) + "=" for _ in range(32)]
    prompts = [np.array(tokenizer(text).input_ids, dtype=np.int32) for text in texts]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
    engine = EmbeddedEngine(folder)
    ours = engine.generate([GenerateRequest(str(i), p, sampling, 0) for i, p in enumerate(prompts)])
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        theirs = model.generate(ids, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(ids))
        assert completion.output_ids.tolist() == theirs[0, len(prompt) :].tolist()
