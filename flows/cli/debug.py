"""`miles run --debug`: rollouts without training, or training without rollouts."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import typer

from flows.cli.options import EXIT_CONFIG, checked_config, out, print_json, show_faults
from miles_core.config.run import RunConfig, Stage


class Debug(StrEnum):
    """Which half of the loop runs."""

    ROLLOUT = "rollout"
    TRAIN = "train"


def run_debug(
    debug: Debug, preset: str | None, file: Path | None, overrides: Sequence[str] | None, *, json: bool
) -> None:
    """Runs the stages that the half needs, then the half itself, and says where its result lies."""
    config = checked_config(preset, file, overrides)
    if faults := _faults(debug, config):
        show_faults(faults)
        raise typer.Exit(EXIT_CONFIG)

    from tasks.pipeline import run_single_stage
    from tasks.progress import show_progress

    stages: tuple[Stage, ...] = ("download", "convert", "quantize")
    with show_progress(quiet=json):
        done = {name: o for stage in stages for name, o in run_single_stage(config, stage).items()}
        if debug is Debug.TRAIN:
            result = run_single_stage(config, "train")["train"].ref.uri
        else:
            from miles_core.cluster.launch import run_sampling
            from storage.store import ArtifactStore

            store = ArtifactStore(config.store.uri, config.store.endpoint_url)
            result = str(run_sampling(config, store.fetch(done["quantize"].ref)))
    if json:
        print_json({debug.value: result})
    else:
        out.print(f"{debug.value}  {result}", soft_wrap=True)


def _faults(debug: Debug, config: RunConfig) -> list[str]:
    option, wanted = {
        Debug.ROLLOUT: ("debug.save_rollouts", config.debug.save_rollouts),
        Debug.TRAIN: ("debug.load_rollouts", config.debug.load_rollouts),
    }[debug]
    faults = []
    if wanted is None:
        faults.append(f"--debug {debug.value} needs {option}, a folder: --set {option}=FOLDER")
    if debug is Debug.ROLLOUT and config.cluster.address is not None:
        faults.append(
            f"--debug rollout runs on this machine, found cluster.address {config.cluster.address}: set it to null"
        )
    return faults
