"""One command a stage: `miles download`, `miles convert`, ... without Prefect, on the same store and with the same keys
as `miles run`."""

from collections.abc import Callable
from typing import Annotated

import typer

from flows.cli.options import ConfigFile, Json, Overrides, Preset, checked_config, err, out, print_json
from miles_core.config.run import STAGES, Stage

_HELP: dict[Stage, str] = {
    "download": "Fetch the model (or make the random one) and verify it.",
    "convert": "Hugging Face folder to Megatron torch_dist checkpoint, MTP layers included.",
    "quantize": "Prepare the model in the rollout's number format.",
    "train": "Train; goes on from the last checkpoint of an interrupted run.",
    "export": "Trained checkpoint to a Hugging Face folder.",
    "evaluate": "Score the initial and the exported model on held-out prompts.",
    "upload": "Publish the exported model, verified, to upload.uri.",
}


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for stage in STAGES:
        app.command(name=stage, help=f"{_HELP[stage]} The stages before must be in the store.")(_command(stage))


def _command(stage: Stage) -> Callable[..., None]:
    def command(
        preset: Preset = None,
        config: ConfigFile = None,
        set_: Overrides = None,
        refresh: Annotated[bool, typer.Option("--refresh", help="Run again even if it is cached.")] = False,
        json: Json = False,
    ) -> None:
        loaded = checked_config(preset, config, set_)

        from tasks.pipeline import run_single_stage
        from tasks.progress import show_progress
        from tasks.stage import MissingArtifactError

        try:
            with show_progress(quiet=json):
                outcomes = run_single_stage(loaded, stage, refresh=refresh)
        except MissingArtifactError as error:
            err.print(str(error), soft_wrap=True)
            raise typer.Exit(2) from None
        if json:
            print_json({name: outcome.model_dump(mode="json") for name, outcome in outcomes.items()})
            return
        for name, outcome in outcomes.items():
            state = "cached" if outcome.cached else f"ran in {outcome.seconds:.1f} s"
            out.print(f"{name}  {state}  {outcome.ref.uri}", soft_wrap=True)

    return command
