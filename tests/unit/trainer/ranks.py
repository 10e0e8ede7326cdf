"""Trainers on one or several ranks, for tests."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tiny_models import checkpoint_folder, geometry_of

from miles_core.config.run import RunConfig
from miles_core.trainer.megatron.trainer import MegatronTrainer

# Ranks are forked from a server that has imported torch and Megatron once.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["miles_core.trainer.megatron.trainer", "transformers"])


@contextmanager
def trainer_of(
    name: str, config: RunConfig, *, rank: int = 0, init_method: str | None = None, checkpoint: Path | None = None
) -> Iterator[MegatronTrainer]:
    """A trainer of this process, closed at the end."""
    with TemporaryDirectory() as folder:
        trainer = MegatronTrainer(
            config,
            geometry_of(name),
            rank=rank,
            world_size=config.trainer.num_ranks,
            init_method=init_method or f"file://{folder}/rendezvous",
            checkpoint=checkpoint or checkpoint_folder(name),
        )
        try:
            yield trainer
        finally:
            trainer.close()


def on_ranks(name: str, config: RunConfig, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(trainer, *arguments)` on each rank, in new processes; their results in order."""
    size = config.trainer.num_ranks
    with TemporaryDirectory() as folder:
        init_method, checkpoint = f"file://{folder}/rendezvous", checkpoint_folder(name)
        jobs = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            args = (theirs, name, config, rank, init_method, checkpoint, work, arguments)
            process = _CONTEXT.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            jobs.append((process, ours))
        results = [ours.recv() for _, ours in jobs]
        for process, _ in jobs:
            process.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _rank_main(
    pipe: Any,
    name: str,
    config: RunConfig,
    rank: int,
    init_method: str,
    checkpoint: Path,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with trainer_of(name, config, rank=rank, init_method=init_method, checkpoint=checkpoint) as trainer:
            pipe.send(work(trainer, *arguments))
    except BaseException as error:
        error.add_note(f"rank {rank}:\n{traceback.format_exc()}")  # a traceback itself does not cross processes
        pipe.send(error)
