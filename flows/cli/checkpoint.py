"""`miles checkpoint`: what a checkpoint holds, how two differ, whether one is whole; exit codes are for scripts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from flows.cli.options import Json, err, out, print_json

if TYPE_CHECKING:
    from conversion.inspect import TensorStats
    from storage.progress import Progress

app = typer.Typer(no_args_is_help=True, help="Inspect, compare and verify checkpoints, Hugging Face or torch_dist.")

EXIT_UNREADABLE = 2
Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A Hugging Face or torch_dist folder.")]


@app.command()
def inspect(folder: Folder, json: Json = False) -> None:
    """List every tensor: shape, dtype, norm, NaN and Inf counts. Exit code 1 when a value is not finite."""
    from conversion.inspect import inspect_checkpoint

    with _reading(quiet=json) as progress:
        found = inspect_checkpoint(folder, progress)
    if json:
        print_json({"kind": found.kind, "tensors": [asdict(t) for t in found.tensors]})
    else:
        table = Table("tensor", "shape", "dtype", "norm", "NaN", "Inf", box=None)
        for t in found.tensors:
            table.add_row(t.name, str(list(t.shape)), t.dtype, f"{t.norm:.6g}", str(t.nan or ""), str(t.inf or ""))
        out.print(table)
        out.print(f"{found.kind}: {len(found.tensors)} tensors, {found.parameters:,} values, {decimal(found.nbytes)}")
    raise typer.Exit(int(bool(found.nonfinite)))


@app.command()
def diff(left: Folder, right: Folder, json: Json = False) -> None:
    """Compare two checkpoints bit by bit. Exit code 0 when equal, 1 when not."""
    from conversion.inspect import diff_checkpoints

    with _reading(quiet=json) as progress:
        found = diff_checkpoints(left, right, progress)
    if json:
        print_json({"equal": not found.different, "different": [asdict(row) for row in found.different]})
    else:
        table = Table("tensor", "left", "right", "largest difference", box=None)
        for row in found.different:
            distance = "" if row.max_abs_diff is None else f"{row.max_abs_diff:.3g}"
            table.add_row(row.name, _side(row.left), _side(row.right), distance)
        if found.different:
            out.print(table)
        out.print(f"{len(found.rows) - len(found.different)} of {len(found.rows)} tensors are equal, bit for bit")
    raise typer.Exit(found.exit_code)


@app.command()
def verify(folder: Folder, json: Json = False) -> None:
    """Check that a checkpoint is complete, matches its config and is finite. Exit code 1 with any fault."""
    from conversion.inspect import verify_checkpoint

    with _reading(quiet=json) as progress:
        found = verify_checkpoint(folder, progress)
    if json:
        print_json({"kind": found.kind, "tensors": found.tensors, "faults": found.faults})
    else:
        for fault in found.faults:
            err.print(f"  • {fault}", markup=False, soft_wrap=True)
        out.print(f"{found.kind}: {found.tensors} tensors, {len(found.faults)} faults")
    raise typer.Exit(found.exit_code)


@contextmanager
def _reading(*, quiet: bool) -> Iterator["Progress"]:
    from conversion.safetensors_header import CheckpointError
    from tasks.progress import show_progress, stage_progress

    try:
        with show_progress(quiet=quiet), stage_progress("read") as progress:
            yield progress
    except CheckpointError as error:
        err.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_UNREADABLE) from None


def _side(stats: "TensorStats | None") -> str:
    return "absent" if stats is None else f"{stats.dtype} {list(stats.shape)} norm {stats.norm:.6g}"
