"""Downloads from the Hub are whole or fail; only what is damaged is fetched again."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as constants
import huggingface_hub.file_download as hub_download
import pytest
from fake_hub import COMMIT, REPO, FakeHub, serve, sha256

from tasks.hub import HubError, fetch_snapshot, is_wanted, resolve_commit
from tasks.retries import passes_by_itself

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"# tiny",
    "onnx/model.json": b"{}",
}
WANTED = {name for name in FILES if is_wanted(name)}
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    large = {name for name in FILES if name.endswith((".safetensors", ".bin"))}
    with serve(FakeHub(dict(FILES), large)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_download.time, "sleep", lambda seconds: None)  # between attempts of its own
        yield hub


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def cached_file(tmp_path: Path, name: str) -> Path:
    (pointer,) = (tmp_path / "cache").rglob(f"snapshots/{COMMIT}/{name}")
    return pointer.resolve()


def test_only_data_files_of_the_model_are_wanted() -> None:
    assert {"config.json", "model-00001-of-00002.safetensors", SHARD, "tokenizer.json"} == WANTED


def test_every_file_arrives_and_the_rest_is_accounted_for(hub: FakeHub, out: Path) -> None:
    account = fetch_snapshot(REPO, COMMIT, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {name: FILES[name] for name in WANTED}
    assert sorted(hub.sent) == sorted(WANTED)
    assert account == {
        "source": f"hf://{REPO}",
        "commit": COMMIT,
        "files": 4,
        "refetched": [],
        "left_out": ["README.md", "modeling_tiny.py", "onnx/model.json", "pytorch_model.bin"],
    }


def test_interrupted_broken_healthy_then_damaged(hub: FakeHub, out: Path, tmp_path: Path) -> None:
    hub.cut_off = SHARD
    with pytest.raises(Exception) as cut_off:
        fetch_snapshot(REPO, COMMIT, out)
    hub.cut_off, hub.broken = None, True
    with pytest.raises(Exception) as broken:
        fetch_snapshot(REPO, COMMIT, out)
    assert passes_by_itself(cut_off.value)
    assert passes_by_itself(broken.value)
    assert not (out / SHARD).exists()

    hub.broken = False
    assert fetch_snapshot(REPO, COMMIT, out)["refetched"] == []
    assert sha256((out / SHARD).read_bytes()) == sha256(FILES[SHARD])

    damaged = cached_file(tmp_path, SHARD)
    damaged.unlink()
    damaged.write_bytes(FILES[SHARD][:1000])
    hub.sent.clear()
    assert fetch_snapshot(REPO, COMMIT, out)["refetched"] == [SHARD]
    assert hub.sent == [SHARD]
    assert sha256((out / SHARD).read_bytes()) == sha256(FILES[SHARD])


def test_bytes_that_are_not_those_listed_are_refused(hub: FakeHub, out: Path) -> None:
    listing = hub.listing()
    hub.files[SHARD] = WEIGHTS
    hub.listing = lambda: listing  # type: ignore[method-assign]
    with pytest.raises(HubError, match=f"{SHARD} of hf://{REPO} at {COMMIT} does not have the checksum"):
        fetch_snapshot(REPO, COMMIT, out)


def test_offline_use_of_the_cache(hub: FakeHub, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_commit(REPO, None) == COMMIT
    fetch_snapshot(REPO, COMMIT, tmp_path)
    hub.sent.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch_snapshot(REPO, COMMIT, out)
    assert {path.name for path in out.iterdir()} == WANTED
    assert hub.sent == []

    damaged = cached_file(tmp_path, SHARD)
    damaged.unlink()
    damaged.write_bytes(FILES[SHARD][:1000])
    with pytest.raises(HubError, match="is damaged; unset HF_HUB_OFFLINE"):
        fetch_snapshot(REPO, COMMIT, out)


def test_offline_without_the_model(hub: FakeHub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=f"hf://{REPO} .*is not complete in the Hub's local cache; unset HF_HUB_OFFLINE"):
        fetch_snapshot(REPO, COMMIT, out)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_revision_becomes_a_commit(hub: FakeHub, revision: str | None) -> None:
    assert resolve_commit(REPO, revision) == COMMIT


@pytest.mark.parametrize(
    ("repo", "revision", "message"),
    [
        (REPO, "no-such-branch", f"hf://{REPO} at revision no-such-branch does not exist; change model.revision"),
        ("no/such", None, "hf://no/such does not exist or is private; change model.path or set HF_TOKEN"),
    ],
)
def test_what_is_not_there_is_named_with_its_option(
    hub: FakeHub, repo: str, revision: str | None, message: str
) -> None:
    with pytest.raises(HubError, match=message) as error:
        resolve_commit(repo, revision)
    assert not passes_by_itself(error.value)
