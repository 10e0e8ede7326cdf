"""Trainers on one or several ranks, for tests."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from trainer_models import checkpoint_folder, geometry_of

from conversion.geometry import ModelGeometry
from miles_core.config.run import RunConfig
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.weight_sync.bucket import tensor_digest

# Ranks are forked from a server that has imported torch and Megatron once.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["miles_core.trainer.megatron.trainer", "transformers"])


@contextmanager
def trainer_of(name: str, config: RunConfig) -> Iterator[MegatronTrainer]:
    """A trainer of one rank in this process, closed at the end."""
    with TemporaryDirectory() as folder:
        trainer = _start(config, geometry_of(name), checkpoint_folder(name), 0, folder)
        try:
            yield trainer
        finally:
            trainer.close()


def on_ranks(name: str, config: RunConfig, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(trainer, *arguments)` on each rank, in new processes; their results in order."""
    with TemporaryDirectory() as folder:
        jobs = []
        for rank in range(config.trainer.num_ranks):
            ours, theirs = _CONTEXT.Pipe()
            start = (config, geometry_of(name), checkpoint_folder(name), rank, folder)
            process = _CONTEXT.Process(target=_rank_main, args=(theirs, start, work, arguments), daemon=True)
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


def weight_digests(trainer: MegatronTrainer) -> dict[str, str]:
    """sha256 of each tensor as it leaves the trainer, by Hugging Face name."""
    return {name: tensor_digest(tensor) for name, tensor in trainer.named_weights()}


def _start(config: RunConfig, geometry: ModelGeometry, checkpoint: Path, rank: int, folder: str) -> MegatronTrainer:
    return MegatronTrainer(
        config,
        geometry,
        rank=rank,
        world_size=config.trainer.num_ranks,
        init_method=f"file://{folder}/rendezvous",
        checkpoint=checkpoint,
    )


def _rank_main(pipe: Any, start: tuple[Any, ...], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        trainer = _start(*start)
        pipe.send(work(trainer, *arguments))
        trainer.close()
    except BaseException as error:
        error.add_note(traceback.format_exc())  # a traceback itself does not cross processes
        pipe.send(error)
