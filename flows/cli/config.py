"""`miles config`: what can be set, what a preset sets, and whether a configuration is sound."""

from typing import Any

import typer
from rich.table import Table

from flows.cli.options import ConfigFile, Json, Overrides, Preset, checked_config, faults_shown, out, print_json
from miles_core.config.load import describe_fields, load_config, preset_names

app = typer.Typer(no_args_is_help=True, help="Show, explain and validate configurations.")


@app.command()
def show(preset: Preset = None, config: ConfigFile = None, set_: Overrides = None, json: Json = False) -> None:
    """Print the whole configuration after presets, file and overrides."""
    with faults_shown():
        loaded = load_config(preset, config, set_ or ())
    if json:
        print_json(loaded.model_dump(mode="json"))
        return
    table = Table("option", "value", box=None)
    for path, value in _flatten(loaded.model_dump(mode="json")):
        table.add_row(path, str(value))
    out.print(table)


@app.command()
def validate(preset: Preset = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Check the configuration and all that it points to: files, model family, store. Starts nothing."""
    checked_config(preset, config, set_)
    out.print("The configuration is sound.")


@app.command()
def fields(prefix: str = typer.Argument("", help="Only options below this one, e.g. rollout.")) -> None:
    """Explain every option: type, default, meaning."""
    table = Table("option", "type", "default", "meaning", box=None)
    for row in describe_fields():
        if row.path.startswith(prefix):
            table.add_row(row.path, row.type, str(row.default), row.doc)
    out.print(table)


@app.command()
def presets() -> None:
    """List the presets."""
    for name in preset_names():
        out.print(name)


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            rows += _flatten(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows
