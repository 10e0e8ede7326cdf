import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from storage.filesystem import open_store
from storage.manifest import MANIFEST_NAME, ArtifactRef
from storage.retry import StoreError
from storage.store import ArtifactStore

FIELDS: dict[str, Any] = {"stage": "convert", "inputs": {"hf": "d1"}, "outputs": {"weights": "sub"}, "config": {"n": 1}}
WEIGHTS = bytes(range(256)) * 5000


def make(store: ArtifactStore, key: str = "k1", log: str = "12:00", **changes: Any) -> ArtifactRef:
    folder = store.work_dir("torch_dist", key)
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "w.bin").write_bytes(WEIGHTS)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "logs.txt").write_text(log)
    return store.commit("torch_dist", key, account={"tensors": 3}, volatile=["logs*"], **{**FIELDS, **changes})


def test_commit_find_fetch_on_another_machine(target) -> None:
    ref = make(target.store("a"))
    b = target.store("b")
    assert b.find("torch_dist", "k1") == ref and b.find("torch_dist", "k2") is None
    assert ref.uri == f"{target.uri}/torch_dist/k1"
    folder = b.fetch(ref, verify=True)
    assert (folder / "sub" / "w.bin").read_bytes() == WEIGHTS
    manifest = b.manifest(ref)
    assert manifest.inputs == {"hf": "d1"} and manifest.account == {"tensors": 3} and manifest.config == {"n": 1}
    assert [(f.name, f.volatile) for f in manifest.files] == [
        ("config.json", False),
        ("logs.txt", True),
        ("sub/w.bin", False),
    ]
    assert "miles-on-prefect" in manifest.versions
    b.verify(ref)


def test_equal_files_have_an_equal_digest(target) -> None:
    store = target.store()
    assert make(store, "k1", log="12:00").digest == make(store, "k2", log="13:45", config={"n": 2}).digest


@pytest.mark.parametrize("name", ["sub/w.bin", "config.json"])
def test_every_file_must_be_there(target, name: str) -> None:
    ref = make(target.store())
    fs, root = open_store(target.uri, target.endpoint_url)
    fs.rm_file(f"{root}/torch_dist/k1/{name}")
    store = target.store("b")
    assert store.find("torch_dist", "k1") is None
    for use in (store.fetch, store.verify):
        with pytest.raises(StoreError, match=name):
            use(ref)


def test_copied_manifest_of_another_artifact_does_not_count(local) -> None:
    store = local.store()
    folder = store.fetch(make(store, "k1"))
    shutil.copytree(folder, folder.parent / "k2")
    assert store.find("torch_dist", "k2") is None
    assert [entry.complete for entry in store.ls()] == [True, False]
    assert MANIFEST_NAME not in {path.name for path in store.work_dir("torch_dist", "k2").iterdir()}


def test_corrupted_file_is_detected(target) -> None:
    ref = make(target.store())
    fs, root = open_store(target.uri, target.endpoint_url)
    fs.pipe_file(f"{root}/torch_dist/k1/sub/w.bin", WEIGHTS[:-1] + b"!")
    store = target.store("b")
    assert store.find("torch_dist", "k1") == ref  # sizes alone are right
    with pytest.raises(StoreError, match=r"sub/w\.bin"):
        store.verify(ref)
    with pytest.raises(StoreError, match=r"sub/w\.bin"):
        store.fetch(ref, verify=True)


def test_corrupted_local_copy_is_detected_and_restored(remote) -> None:
    ref = make(remote.store("a"))
    store = remote.store("b")
    copy = store.fetch(ref) / "sub" / "w.bin"
    copy.write_bytes(WEIGHTS[:-1] + b"!")
    with pytest.raises(StoreError, match=r"sub/w\.bin"):
        store.fetch(ref, verify=True)
    copy.unlink()
    assert (store.fetch(ref, verify=True) / "sub" / "w.bin").read_bytes() == WEIGHTS


def test_fetch_reuses_the_copy_and_drops_leftovers(remote) -> None:
    ref = make(remote.store("a"))
    b = remote.store("b")
    unfinished = b.work_dir("torch_dist", "k2")
    assert b.fetch(ref) != unfinished
    (b.fetch(ref) / "leftover").write_text("x")
    (b.fetch(ref) / MANIFEST_NAME).unlink()
    steps = []
    folder = b.fetch(ref, progress=lambda *step: steps.append(step))
    assert steps == []  # nothing moved again
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST_NAME, "config.json", "logs.txt", "sub"]


def test_other_contents_under_the_same_key_are_refused(target) -> None:
    store = target.store()
    ref = make(store)
    store.remove("torch_dist", "k1")
    with pytest.raises(StoreError, match="no finished artifact"):
        store.fetch(ref)
    (store.work_dir("torch_dist", "k1") / "extra").write_text("x")
    new = make(store)
    with pytest.raises(StoreError, match=f"has digest {new.digest}, expected {ref.digest}"):
        store.fetch(ref)


def test_failure_before_the_manifest_leaves_unfinished_work_that_resumes(remote, monkeypatch) -> None:
    store = remote.store()
    fs, _ = open_store(remote.uri, remote.endpoint_url)
    original = fs.pipe_file

    def refuse_manifest(path: str, *args: Any, **kwargs: Any) -> None:
        if path.endswith(MANIFEST_NAME):
            raise OSError(28, "No space left on device")
        original(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "pipe_file", refuse_manifest)
        with pytest.raises(OSError, match="No space"):
            make(store)
    assert store.find("torch_dist", "k1") is None
    (entry,) = store.ls()
    assert (entry.complete, entry.files, entry.stage) == (False, 3, None)
    assert (store.work_dir("torch_dist", "k1") / "sub" / "w.bin").read_bytes() == WEIGHTS
    assert store.find("torch_dist", "k1") is None
    assert store.fetch(make(store), verify=True)


def test_sigkill_in_commit_leaves_unfinished_work(local) -> None:
    store = local.store()
    folder = store.work_dir("torch_dist", "k1")
    (folder / "w.bin").write_bytes(WEIGHTS)
    child = os.fork()
    if child == 0:
        store.commit(
            "torch_dist",
            "k1",
            **{**FIELDS, "outputs": {}},
            account={},
            progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL),
        )
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert store.find("torch_dist", "k1") is None
    assert [path.name for path in folder.iterdir()] == ["w.bin"]


COMMIT = """
import sys
from storage.store import ArtifactStore
store = ArtifactStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
fields = dict(stage="convert", inputs={}, outputs={}, config={}, account={})
print(store.commit("torch_dist", "k1", **fields).digest)
"""


def test_two_processes_commit_the_same_artifact(local) -> None:
    folder = local.store().work_dir("torch_dist", "k1")
    for i in range(20):
        (folder / f"{i}.bin").write_bytes(WEIGHTS)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", COMMIT, local.uri], **pipes) for _ in range(2)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    digests = [racer.communicate()[0] for racer in racers]
    ref = local.store().find("torch_dist", "k1")
    assert ref is not None and digests == [ref.digest + "\n"] * 2
    local.store().verify(ref)


def test_two_threads_fetch_the_same_artifact(s3) -> None:
    ref = make(s3.store("a"))
    store, results = s3.store("b"), []
    threads = [threading.Thread(target=lambda: results.append(store.fetch(ref, verify=True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and (results[0] / "sub" / "w.bin").read_bytes() == WEIGHTS


def test_work_dir_of_a_finished_artifact_is_refused_and_of_a_damaged_one_reopened(target) -> None:
    store = target.store()
    make(store)
    with pytest.raises(StoreError, match="is finished"):
        store.work_dir("torch_dist", "k1")
    fs, root = open_store(target.uri, target.endpoint_url)
    fs.rm_file(f"{root}/torch_dist/k1/config.json")
    folder = store.work_dir("torch_dist", "k1")
    assert not (folder / MANIFEST_NAME).exists() and (folder / "sub" / "w.bin").exists()
    assert store.find("torch_dist", "k1") is None
    ref = make(store)
    assert store.find("torch_dist", "k1") == ref


def test_commit_needs_files_and_outputs(target) -> None:
    store = target.store()
    folder = store.work_dir("torch_dist", "k1")
    with pytest.raises(StoreError, match="nothing was written"):
        store.commit("torch_dist", "k1", **FIELDS, account={})
    (folder / "w.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"outputs \['sub'\] are missing"):
        store.commit("torch_dist", "k1", **FIELDS, account={})
    assert store.find("torch_dist", "k1") is None


@pytest.mark.parametrize(("kind", "key"), [("a/b", "k"), ("hf", "../k"), ("hf", ""), (".locks", "k")])
def test_names_of_artifacts(local, kind: str, key: str) -> None:
    with pytest.raises(StoreError, match="can not name an artifact"):
        local.store().find(kind, key)


def test_ls_and_remove(target) -> None:
    store = target.store()
    ref = make(store)
    fs, root = open_store(target.uri, target.endpoint_url)
    fs.pipe_file(f"{root}/hf/half/w.bin", b"123")
    with store.lock("hf", "half"):
        half, whole = store.ls()
    assert (half.kind, half.key, half.size, half.files, half.complete) == ("hf", "half", 3, 1, False)
    assert (whole.uri, whole.files, whole.complete, whole.stage) == (ref.uri, 3, True, "convert")
    assert whole.size == len(WEIGHTS) + 2 + 5 and whole.created == store.manifest(ref).created
    for entry in (half, whole):
        store.remove(entry.kind, entry.key)
    assert store.ls() == [] and store.find("torch_dist", "k1") is None


def test_checkpoints_move_to_another_machine(remote) -> None:
    a, b = remote.store("a"), remote.store("b")

    def save(store: ArtifactStore, step: int, keep: int = 2) -> None:
        folder = store.work_dir("train", "k1") / "checkpoints"
        (folder / str(step)).mkdir(parents=True)
        (folder / str(step) / "w.bin").write_bytes(WEIGHTS + bytes([step]))
        (folder / str(step) / "DONE").write_text(str(step))
        for old in sorted(folder.iterdir(), key=lambda path: int(path.name))[:-keep]:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        store.sync_up("train", "k1", "checkpoints", marker="DONE")

    assert not b.sync_down("train", "k1", "checkpoints")
    for step in (1, 2, 3):
        save(a, step)
    order: list[str] = []
    assert b.sync_down("train", "k1", "checkpoints", progress=lambda done, total, what: order.append(what))
    assert order == ["2/w.bin", "3/w.bin", "2/DONE", "3/DONE"]
    folder = b.work_dir("train", "k1") / "checkpoints"
    assert (folder / "3" / "w.bin").read_bytes() == WEIGHTS + bytes([3])
    assert b.find("train", "k1") is None
    save(b, 4)
    assert a.sync_down("train", "k1", "checkpoints")
    assert sorted(path.name for path in (a.work_dir("train", "k1") / "checkpoints").iterdir()) == ["2", "3", "4"]
    for name in ("2", "3"):
        for file in (folder / name).glob("*"):
            file.unlink()
    ref = b.commit("train", "k1", stage="train", inputs={}, outputs={}, config={}, account={})
    assert [entry.name for entry in a.manifest(ref).files] == ["checkpoints/4/DONE", "checkpoints/4/w.bin"]
    fs, root = open_store(remote.uri, remote.endpoint_url)
    assert len(fs.find(f"{root}/train/k1")) == 3  # the index of the copies went with the commit


def test_sync_of_single_folders(remote) -> None:
    """Each checkpoint pushed on its own; one pull of the folder above them."""
    a, b = remote.store("a"), remote.store("b")
    for step in ("1", "2"):
        folder = a.work_dir("train", "k1") / "checkpoints" / step
        folder.mkdir(parents=True)
        (folder / "DONE").write_text(step)
        a.sync_up("train", "k1", f"checkpoints/{step}", marker="DONE")
    assert b.sync_down("train", "k1", "checkpoints")
    assert sorted(p.read_text() for p in b.work_dir("train", "k1").rglob("DONE")) == ["1", "2"]


def test_local_store_needs_no_sync(local, tmp_path: Path) -> None:
    store = local.store()
    folder = store.work_dir("train", "k1") / "checkpoints"
    assert not store.sync_down("train", "k1", "checkpoints")
    folder.mkdir()
    store.sync_up("train", "k1", "checkpoints", marker="DONE")
    assert store.sync_down("train", "k1", "checkpoints")
    assert list(folder.iterdir()) == [] and not (tmp_path / "scratch").exists()
