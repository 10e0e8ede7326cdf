"""Half of the loop: rollouts as files, and training on them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, small_config

from miles_core.config.run import RunConfig
from miles_core.rollout.files import rollout_file
from miles_core.rollout.saved import SavedRolloutError, load_rollout
from storage.store import ArtifactStore
from tasks.pipeline import run_single_stage

_WIDE = os.environ | {"COLUMNS": "1000"}
MILES = [sys.executable, "-m", "flows.cli.app"]


def _config(store: Path, **sections: Any) -> RunConfig:
    return small_config(store, **{"data": SMALL["data"] | {"max_prompt_length": 16}, **sections})


def _train(config: RunConfig) -> dict[str, str]:
    """Digests of the trained weights."""
    for stage in ("download", "convert", "quantize", "train"):
        outcomes = run_single_stage(config, stage)
    folder = ArtifactStore(config.store.uri).fetch(outcomes["train"].ref)
    return json.loads((folder / "weights.json").read_text())


def _miles(config: RunConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = Path(config.store.uri).parent / "run.json"
    file.write_text(config.model_dump_json(exclude_none=True))
    return subprocess.run([*MILES, "run", "--config", str(file), *arguments], capture_output=True, text=True, env=_WIDE)


@pytest.mark.slow
def test_training_on_saved_rollouts_gives_the_weights_of_the_run_that_saved_them(tmp_path: Path) -> None:
    saved = tmp_path / "rollouts"
    whole = _config(tmp_path / "store", debug={"save_rollouts": str(saved)})
    weights = _train(whole)
    assert sorted(path.name for path in saved.iterdir()) == [f"rollout_{i:07d}.npz" for i in range(3)]
    versions = [{int(v) for g in load_rollout(p).groups for s in g.samples for v in s.weight_versions} for p in
                sorted(saved.iterdir())]  # fmt: skip
    assert versions == [{0}, {1}, {2}]

    again = _config(tmp_path / "store", debug={"load_rollouts": str(saved)})
    done = _miles(again, "--debug", "train", "--json")
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["train"])
    assert json.loads((folder / "weights.json").read_text()) == weights
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows] == [True] * 3

    # Another model: the same shape, other weights.
    other = _config(
        tmp_path / "store", model={"random": {"max_position": 64, "seed": 1}}, debug={"load_rollouts": str(saved)}
    )
    with pytest.raises(SavedRolloutError, match="does not belong to this run: weights"):
        _train(other)


@pytest.mark.slow
def test_rollouts_without_training(tmp_path: Path) -> None:
    saved = tmp_path / "rollouts"
    config = _config(tmp_path / "store", debug={"save_rollouts": str(saved)})
    done = _miles(config, "--debug", "rollout", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"rollout": str(saved)}
    assert len((saved / "metrics.jsonl").read_text().splitlines()) == 3
    rollouts = [load_rollout(rollout_file(saved, i)) for i in range(3)]
    assert len({r.weights for r in rollouts}) == 1 and [len(r.groups) for r in rollouts] == [4, 4, 4]
    samples = [s for r in rollouts for g in r.groups for s in g.samples]
    assert len({s.index for s in samples}) == 48 and all(s.reward is not None for s in samples)
    assert all(np.isfinite(s.rollout_log_probs).all() for s in samples)
    assert not (tmp_path / "store" / "train").exists()


def test_a_half_without_its_folder_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path / "store")
    for half, option in (("rollout", "debug.save_rollouts"), ("train", "debug.load_rollouts")):
        done = _miles(config, "--debug", half)
        assert done.returncode == 2 and f"--debug {half} needs {option}" in done.stderr
    missing = _config(tmp_path / "store", debug={"load_rollouts": str(tmp_path / "nothing")})
    done = _miles(missing, "--debug", "train")
    assert done.returncode == 2 and "0 of the 3 rollouts" in done.stderr and "rollout_0000000.npz" in done.stderr
