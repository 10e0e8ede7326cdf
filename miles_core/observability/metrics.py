"""Where the numbers of a run go: console, JSON lines, TensorBoard."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console

Metrics = dict[str, float]
OnMetrics = Callable[[Metrics], None]


class Sink(Protocol):
    """Takes the metrics of one rollout."""

    def write(self, rollout_id: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a rollout, in a new file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write(self, rollout_id: int, metrics: Metrics) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps({"rollout_id": rollout_id, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, float]]:
    """What `JsonLines` wrote, in order; null is NaN again."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


class TensorBoard:
    """Scalars under the metrics' own names, in a new folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))

    def write(self, rollout_id: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, rollout_id)

    def close(self) -> None:
        self._writer.close()


# What the console shows of a rollout; a run has those that its algorithm gives.
_SHOWN = {
    "rollout/raw_reward": "reward [green]{:.3f}[/]",
    "rollout/response_len/mean": "length {:.1f}",
    "train/loss": "loss {:+.4f}",
    "train/grad_norm": "grad {:.3f}",
    "train/train_rollout_logprob_abs_diff": "|Δlogp| {:.1e}",
    "train/critic-explained_variance": "explained variance {:.2f}",
    "train/opd_reverse_kl": "KL to teacher {:.4f}",
    "perf/step_time": "[dim]{:.2f}s[/]",
}


class ConsoleLine:
    """One line a rollout, at most one each `every_seconds` and always the last."""

    def __init__(self, num_rollout: int, every_seconds: float = 2.0) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._num_rollout, self._every, self._last = num_rollout, every_seconds, 0.0

    def write(self, rollout_id: int, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self._last < self._every and rollout_id + 1 < self._num_rollout:
            return
        self._last = now
        shown = [text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics]
        self._console.print(f"rollout [bold]{rollout_id + 1}/{self._num_rollout}[/]  {'  '.join(shown)}")

    def close(self) -> None:
        self._last = 0.0


class Report:
    """Hands the metrics on to a callback, the rollout's id among them."""

    def __init__(self, on_metrics: OnMetrics) -> None:
        self._on_metrics = on_metrics

    def write(self, rollout_id: int, metrics: Metrics) -> None:
        self._on_metrics({"rollout_id": rollout_id, **metrics})

    def close(self) -> None:
        """Nothing is held."""


class Timers:
    """Seconds spent in named parts of a step."""

    def __init__(self) -> None:
        self.seconds: Metrics = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
