"""Checkpoints of a run: complete or not there.

    checkpoints/
      iter_0000010/               after 10 rollouts
        ...                       what the trainer wrote (torch_dist)
        run_state.json            the prompt source's position
        metrics.jsonl             the attachments: what the run had recorded by then
        COMPLETE.json             names and sizes of all of the above, written last
      latest_checkpointed_iteration.txt

A folder without a true COMPLETE.json is the rest of an interrupted save; it is never loaded.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

MARKER = "COMPLETE.json"
_STATE = "run_state.json"
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run.

    `attachments` are files that each checkpoint takes a copy of; `publish` copies all of `root` to a remote store.
    """

    root: Path
    keep: int
    attachments: tuple[Path, ...] = ()
    publish: Callable[[], None] = lambda: None

    def folder(self, done: int) -> Path:
        """Where the checkpoint after `done` rollouts lies."""
        return self.root / _name(done)

    def save(self, done: int, save_trainer: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Writes the checkpoint after `done` rollouts, marker last, then removes all but the newest `keep`."""
        folder = self.folder(done)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_trainer(folder)
        (folder / _STATE).write_text(json.dumps(state))
        for file in self.attachments:
            shutil.copyfile(file, folder / file.name)
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        _write_atomically(folder / MARKER, json.dumps({"done": done, "files": sizes}, indent=1))
        _write_atomically(self.root / _TRACKER, str(done))
        for old in self._iterations()[: -self.keep]:
            shutil.rmtree(self.folder(old))
        self.publish()

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """The newest complete checkpoint and its state; says on stderr why a newer folder was passed over."""
        for done in reversed(self._iterations()):
            fault = self._fault(done)
            if fault is None:
                return done, json.loads((self.folder(done) / _STATE).read_text())
            Console(stderr=True, highlight=False).print(
                f"checkpoint {_name(done)} is not complete: {fault}", soft_wrap=True
            )
        return None

    def _iterations(self) -> list[int]:
        return sorted(int(p.name.removeprefix("iter_")) for p in self.root.glob("iter_*"))

    def _fault(self, done: int) -> str | None:
        folder = self.folder(done)
        if not (folder / MARKER).is_file():
            return f"{MARKER} is missing, the save was interrupted"
        for name, size in json.loads((folder / MARKER).read_text())["files"].items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, {size} were written"
        return None


def _name(done: int) -> str:
    return f"iter_{done:07d}"


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
