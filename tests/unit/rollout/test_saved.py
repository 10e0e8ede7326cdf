"""Rollouts as files: what comes back is what went in, and nothing that does not belong."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from miles_core.config.run import RunConfig
from miles_core.rollout.files import rollout_file
from miles_core.rollout.saved import Origin, RolloutFolder, SavedCollector, SavedRolloutError, load_rollout
from miles_core.types import Sample, SampleGroup, SampleStatus

ORIGIN = Origin("a" * 64, "b" * 64, 0.7)


def sample(index: int, prompt: int, response: int, *, routes: bool = False, **changes: object) -> Sample:
    rng = np.random.default_rng(index)
    made = Sample(
        group_index=index // 2,
        index=index,
        prompt_index=7 * index,
        tokens=rng.integers(0, 99, prompt + response).astype(np.int32),
        response_length=response,
        response=f"ä {index}",
        status=SampleStatus.TRUNCATED,
        loss_mask=rng.integers(0, 2, response).astype(np.uint8),
        rollout_log_probs=rng.normal(-2, 1, response).astype(np.float32),
        weight_versions=np.full(response, 3, dtype=np.int32),
        routed_experts=rng.integers(0, 8, (prompt + response - 1, 2, 2)).astype(np.int16) if routes else None,
        reward=0.25 * index,
        metadata={"turns": [1, 2]},
    )
    return replace(made, **changes)


def groups(*, routes: bool) -> list[SampleGroup]:
    made = [sample(0, 3, 4, routes=routes), sample(1, 3, 1, routes=routes), sample(2, 5, 2, routes=routes)]
    failed = sample(3, 5, 6, reward=None, status=SampleStatus.FAILED, routes=routes)
    return [SampleGroup(tuple(made[:2])), SampleGroup((made[2], failed))]


@pytest.mark.parametrize("routes", [True, False])
def test_what_comes_back_is_what_went_in(tmp_path: Path, routes: bool) -> None:
    given = groups(routes=routes)
    RolloutFolder(tmp_path, ORIGIN).save(5, given, "w")
    found = load_rollout(rollout_file(tmp_path, 5))
    assert (found.rollout_id, found.origin, found.weights) == (5, ORIGIN, "w")
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_0000005.npz"]
    for ours, theirs in zip(given, found.groups, strict=True):
        for a, b in zip(ours.samples, theirs.samples, strict=True):
            for item in fields(Sample):
                x, y = getattr(a, item.name), getattr(b, item.name)
                if isinstance(x, np.ndarray):
                    assert x.dtype == y.dtype
                    np.testing.assert_array_equal(x, y)
                else:
                    assert x == y and type(x) is type(y)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    RolloutFolder(tmp_path, ORIGIN).save(0, groups(routes=True), "w")
    path = rollout_file(tmp_path, 0)
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "long.npz", **arrays | {"tokens": np.append(arrays["tokens"], 1)})
    with pytest.raises(SavedRolloutError, match="tokens has 30 entries, the samples take 29"):
        load_rollout(tmp_path / "long.npz")
    np.savez(tmp_path / "short.npz", **arrays | {"loss_mask": arrays["loss_mask"][:-1]})
    with pytest.raises(SavedRolloutError, match="loss_mask ends 1 entries too early"):
        load_rollout(tmp_path / "short.npz")
    meta = json.loads(str(arrays["meta"])) | {"format": 0}
    np.savez(tmp_path / "old.npz", **arrays | {"meta": np.array(json.dumps(meta))})
    with pytest.raises(SavedRolloutError, match="format 0"):
        load_rollout(tmp_path / "old.npz")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SavedRolloutError, match="no saved rollout"):
        load_rollout(path)


def _collector(folder: Path, origin: Origin = ORIGIN, weights: str = "w", **rollout: object) -> SavedCollector:
    sections = {"batch_size": 2, "n_samples_per_prompt": 2, "sampling": {"temperature": 0.7}, **rollout}
    config = RunConfig.model_validate(
        {"model": {"random": {}}, "data": {"task": {}}, "rollout": sections, "trainer": {"micro_batch_size": 1}}
    )
    return SavedCollector(config, folder, origin, weights)


def test_the_collector_serves_them_in_order_and_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = RolloutFolder(tmp_path, ORIGIN)
    for rollout_id, weights in ((0, "w"), (1, "trained")):
        folder.save(rollout_id, groups(routes=False), weights)
    collector = _collector(tmp_path)
    found, metrics = collector.collect()
    assert [s.index for g in found for s in g.samples] == [0, 1, 2, 3] and metrics["rollout/failed_samples"] == 1
    resumed = _collector(tmp_path)
    resumed.load_state_dict(json.loads(json.dumps(collector.state_dict())))
    assert len(resumed.collect()[0]) == 2
    with pytest.raises(SavedRolloutError, match="rollout_0000002"):
        resumed.collect()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"origin": replace(ORIGIN, model="c" * 64)}, "model aaa"),
        ({"origin": replace(ORIGIN, tokenizer="c" * 64)}, "tokenizer bbb"),
        ({"origin": replace(ORIGIN, temperature=1.0)}, "temperature 0.7, this run has 1.0"),
        ({"weights": "other"}, "weights w, this run has other"),
        ({"n_samples_per_prompt": 4}, r"group sizes \[2, 2\], this run has \[4, 4\]"),
        ({"batch_size": 1}, r"group sizes \[2, 2\], this run has \[2\]"),
    ],
)
def test_rollouts_of_another_run_are_refused(tmp_path: Path, changes: dict, named: str) -> None:
    RolloutFolder(tmp_path, ORIGIN).save(0, groups(routes=False), "w")
    with pytest.raises(SavedRolloutError, match=named):
        _collector(tmp_path, **changes).collect()
