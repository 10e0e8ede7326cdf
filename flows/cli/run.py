"""`miles run`: the whole pipeline, as the Prefect flow, from this terminal."""

from typing import Annotated

import typer
from rich.table import Table

from flows.cli.debug import Debug, run_debug
from flows.cli.options import ConfigFile, Json, Overrides, Preset, checked_config, err, out, print_json
from flows.server import start
from flows.summary import RunSummary
from miles_core.config.run import STAGES, Stage


def run(
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    refresh: Annotated[list[str] | None, typer.Option(help="Run this stage again even if it is cached.")] = None,
    from_stage: Annotated[str | None, typer.Option(help="Run this stage and all after it again.")] = None,
    debug: Annotated[
        Debug | None,
        typer.Option(
            help="Only half of the loop, without Prefect: rollout samples with the initial model into "
            "debug.save_rollouts, train trains on debug.load_rollouts."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run all stages; those whose result is in the store are skipped, an interrupted one goes on."""
    if debug is not None:
        run_debug(debug, preset, config, set_, json=json)
        return
    stages = [_stage(name) for name in refresh or []]
    first = _stage(from_stage) if from_stage else None
    loaded = checked_config(preset, config, set_)

    server = start()  # before the heavy imports, so that the two go on side by side
    from flows.direct import run_here
    from tasks.progress import show_progress

    with show_progress(quiet=json):
        summary = run_here(loaded, stages, first, server)
    if json:
        print_json(summary.model_dump(mode="json"))
    else:
        show_summary(summary)


def _stage(name: str) -> Stage:
    for stage in STAGES:
        if stage == name:
            return stage
    err.print(f"unknown stage {name!r}: the stages are {', '.join(STAGES)}")
    raise typer.Exit(2)


def show_summary(summary: RunSummary) -> None:
    """What came out, where it lies, and where to look further."""
    table = Table(title=f"run {summary.name}", title_justify="left", box=None)
    for column in ("stage", "state", "seconds", "artifact"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for s in summary.stages:
        table.add_row(s.stage, "cached" if s.cached else "ran", f"{s.seconds:.1f}", s.uri)
    out.print(table)
    out.print()
    what, first, last = "mean reward", summary.reward_first_10, summary.reward_last_10
    if first is None or last is None:  # supervised fine-tuning
        what, first, last = "mean loss", summary.loss_first_10, summary.loss_last_10
    out.print(f"{what}   first 10 rollouts {first:.3f}, last 10 {last:.3f} ([bold]{last - first:+.3f}[/])")
    for label, before, after in (
        ("held-out reward", summary.initial.mean_reward, summary.final.mean_reward),
        ("held-out accuracy", summary.initial.accuracy, summary.final.accuracy),
    ):
        out.print(f"{label}   initial model {before:.3f}, exported model {after:.3f} ([bold]{after - before:+.3f}[/])")
    verdict = "better than" if summary.final.mean_reward > summary.initial.mean_reward else "not better than"
    out.print(
        f"The exported model scores [bold]{verdict}[/] the initial one on {summary.final.prompts} held-out prompts."
    )
    out.print()
    for label, path in summary.paths.items():
        out.print(f"{label:<12}{path}", soft_wrap=True)
    out.print(f"{'Prefect UI':<12}{summary.ui}", soft_wrap=True)
