"""The options that every command on a run shares, and how faults are shown."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from miles_core.config.load import ConfigError, load_config
from miles_core.config.run import RunConfig

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EXIT_CONFIG = 2  # the configuration or what it points to is at fault; nothing has started

Preset = Annotated[str | None, typer.Option("--preset", "-p", help="Start from a preset: see `miles config presets`.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file laid over the preset.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override one option, e.g. --set rollout.num_rollout=20.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@contextmanager
def faults_shown() -> Iterator[None]:
    """Turns a ConfigError into its list of faults and exit code 2."""
    try:
        yield
    except ConfigError as error:
        show_faults(error.faults)
        raise typer.Exit(EXIT_CONFIG) from None


def show_faults(faults: Sequence[str]) -> None:
    """One line a fault, on stderr."""
    err.print(f"[bold red]{len(faults)} fault{'s' if len(faults) > 1 else ''} in the configuration:[/]")
    for fault in faults:
        err.print(f"  • {fault}", markup=False)


def checked_config(preset: str | None, file: Path | None, overrides: Sequence[str] | None) -> RunConfig:
    """The configuration, with every fault that can be known now reported at once."""
    from miles_core.config.preflight import preflight

    with faults_shown():
        config = load_config(preset, file, overrides or ())
    report = preflight(config)
    for warning in report.warnings:
        err.print(f"[yellow]warning:[/] {warning}")
    if report.faults:
        show_faults(report.faults)
        raise typer.Exit(EXIT_CONFIG)
    return config


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=1, default=str))
