import json
from pathlib import Path

import pytest

from miles_core.checkpoint import MARKER, CheckpointFolder


def write(content: bytes):
    return lambda folder: (folder / "weights.distcp").write_bytes(content)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, keep=2)


def test_the_newest_complete_checkpoint_is_found_with_its_state(checkpoints: CheckpointFolder) -> None:
    assert checkpoints.latest() is None
    for done in (1, 2):
        checkpoints.save(done, write(b"abc"), {"offset": done})
    assert checkpoints.latest() == (2, {"offset": 2})


def test_only_the_newest_are_kept(checkpoints: CheckpointFolder) -> None:
    for done in (1, 2, 3):
        checkpoints.save(done, write(b"abc"), {})
    assert sorted(p.name for p in checkpoints.root.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    assert (checkpoints.root / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_a_failing_save_leaves_the_one_before_as_latest(checkpoints: CheckpointFolder, capsys) -> None:
    checkpoints.save(2, write(b"abc"), {"offset": 2})

    def fails(folder: Path) -> None:
        write(b"half")(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(3, fails, {"offset": 3})
    assert checkpoints.latest() == (2, {"offset": 2})
    assert (checkpoints.root / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert f"iter_0000003 is not complete: {MARKER} is missing" in capsys.readouterr().err
    checkpoints.save(3, write(b"whole"), {"offset": 3})  # the rest of the failed save is no obstacle
    assert checkpoints.latest() == (3, {"offset": 3})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.unlink(), "weights.distcp is missing"),
        (lambda f: f.write_bytes(b"a"), "weights.distcp has 1 bytes, 3 were written"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_the_part_named(checkpoints, damage, said, capsys) -> None:
    checkpoints.save(2, write(b"abc"), {"offset": 2})
    checkpoints.save(3, write(b"abc"), {"offset": 3})
    damage(checkpoints.folder(3) / "weights.distcp")
    assert checkpoints.latest() == (2, {"offset": 2})
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_publishing_happens_after_the_marker(tmp_path: Path) -> None:
    seen = []
    folder = CheckpointFolder(
        tmp_path, keep=1, publish=lambda: seen.append(json.loads((tmp_path / "iter_0000001" / MARKER).read_text()))
    )
    folder.save(1, write(b"x"), {})
    assert [marker["done"] for marker in seen] == [1]


def test_attachments_are_kept_as_they_were_at_the_save(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2, attachments=(log,))
    for done in (1, 2):
        log.write_text("line\n" * done)
        folder.save(done, write(b"x"), {})
    assert [(folder.folder(done) / log.name).read_text() for done in (1, 2)] == ["line\n", "line\nline\n"]
