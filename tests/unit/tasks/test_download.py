"""A model folder counts by its contents, and only a whole one is taken."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_configs import small_config

from conversion.safetensors_header import CheckpointError
from miles_core.config.run import RunConfig
from tasks.download import DOWNLOAD
from tasks.stage import StageJob, run_stage


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "mine"))


def config_of(folder: Path, tmp_path: Path) -> RunConfig:
    return small_config(tmp_path / "store", model={"path": str(folder)})


def download(config: RunConfig) -> StageJob:
    job = StageJob(DOWNLOAD, config, {})
    run_stage(job)
    return job


def test_folder_is_copied_and_accounted_for(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    job = download(config_of(folder, tmp_path))
    ref = job.find()
    assert ref is not None
    copied = {path.name: path.read_bytes() for path in Path(ref.uri).iterdir() if path.name != "MANIFEST.json"}
    kept = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".bin"]
    assert copied == {path.name: path.read_bytes() for path in kept}
    account = job.store.manifest(ref).account
    assert account["left_out"] == ["original", "pytorch_model.bin"]
    assert account["files"] == len(kept)
    assert account["tensors"] > 0


def test_the_users_folder_and_the_artifact_share_no_bytes(folder: Path, tmp_path: Path) -> None:
    ref = download(config_of(folder, tmp_path)).find()
    assert ref is not None
    for path in Path(ref.uri).iterdir():
        assert path.stat().st_nlink == 1


def test_equal_contents_elsewhere_are_the_same_artifact(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    keys = {StageJob(DOWNLOAD, config_of(place, tmp_path), {}).key for place in (folder, moved)}
    assert len(keys) == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_changed_file_is_another_artifact(folder: Path, tmp_path: Path, name: str) -> None:
    before = StageJob(DOWNLOAD, config_of(folder, tmp_path), {}).key
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert StageJob(DOWNLOAD, config_of(folder, tmp_path), {}).key != before


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (only_pickles, "pickle weights only"),
        (truncated, "model.safetensors is truncated"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json: model.path must be"),
        (shutil.rmtree, "is no folder: model.path must be a Hugging Face folder or hf://ORG/NAME"),
    ],
)
def test_what_is_not_whole_is_refused_and_not_cached(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        download(config_of(folder, tmp_path))
    assert not list((tmp_path / "store").rglob("MANIFEST.json"))


def test_random_model_follows_its_parameters_alone(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    first = download(config).find()
    again = download(small_config(tmp_path / "elsewhere", name="other", seed=5)).find()
    assert first is not None
    assert again is not None
    assert (first.key, first.digest) == (again.key, again.digest)
    other = small_config(tmp_path / "store", model={"random": {"max_position": 64, "seed": 1}})
    assert StageJob(DOWNLOAD, other, {}).key != first.key
