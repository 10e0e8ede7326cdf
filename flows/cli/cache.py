"""`miles cache`: the artifacts in a store."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from flows.cli.options import Json, err, out, print_json
from storage.store import ArtifactStore

app = typer.Typer(no_args_is_help=True, help="List and remove artifacts.")

Store = Annotated[str, typer.Option("--store", help="The store's URI.")]
Endpoint = Annotated[str | None, typer.Option("--endpoint-url", help="Endpoint of an S3-compatible server.")]


@app.command()
def ls(store: Store = ".miles/store", endpoint_url: Endpoint = None, json: Json = False) -> None:
    """List artifacts: finished ones, and the rests of interrupted stages."""
    entries = sorted(ArtifactStore(store, endpoint_url).ls(), key=lambda e: e.created or "")
    if json:
        print_json([asdict(entry) for entry in entries])
        return
    table = Table("kind", "key", "size", "files", "created", "state", box=None)
    for e in entries:
        state = "complete" if e.complete else "[yellow]unfinished[/]"
        table.add_row(e.kind, e.key, decimal(e.size), str(e.files), e.created or "", state)
    out.print(table)


@app.command()
def rm(
    key: Annotated[str, typer.Argument(help="A key, or the beginning of exactly one.")],
    store: Store = ".miles/store",
    endpoint_url: Endpoint = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove one artifact; the stage that made it runs again when it is next needed."""
    target = ArtifactStore(store, endpoint_url)
    found = [entry for entry in target.ls() if entry.key.startswith(key)]
    if len(found) != 1:
        listed = ", ".join(f"{e.kind}/{e.key}" for e in found) or "none"
        err.print(f"{key!r} must begin exactly one key of {store}, it begins {len(found)}: {listed}")
        raise typer.Exit(2)
    (entry,) = found
    if not yes:
        typer.confirm(f"Remove {entry.kind}/{entry.key} ({decimal(entry.size)})?", abort=True)
    target.remove(entry.kind, entry.key)
    out.print(f"removed {entry.kind}/{entry.key}")
