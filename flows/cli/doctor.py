"""`miles doctor`: what this machine can run, and what is missing for the rest."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import asdict, dataclass

import psutil
import typer
from rich.table import Table

from flows.cli.options import Json, out, print_json


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    ok: bool
    remedy: str = ""


# distribution, module, what needs it, how to get it
_PACKAGES = (
    ("prefect", "prefect", "the pipeline", "pip install miles-on-prefect"),
    ("s3fs", "s3fs", "s3:// stores", "pip install miles-on-prefect"),
    ("torch", "torch", "conversion and training", "pip install 'miles-on-prefect[train]'"),
    ("transformers", "transformers", "tokenizers", "pip install 'miles-on-prefect[train]'"),
    ("megatron-core", "megatron.core", "training and conversion", "pip install 'miles-on-prefect[train]'"),
    ("ray", "ray", "training", "pip install 'miles-on-prefect[train]'"),
    ("reasoning-gym", "reasoning_gym", "reasoning_gym/ tasks", "pip install 'miles-on-prefect[train]'"),
    ("sglang", "sglang", "rollout.engine=sglang, on GPUs", "pip install 'miles-on-prefect[sglang]'"),
    ("flash-attn", "flash_attn", "faster attention, on GPUs", "pip install 'miles-on-prefect[flash-attn]'"),
)
_OPTIONAL = {"sglang", "flash-attn"}


def examine() -> list[Finding]:
    """Looks at processor, memory, disk, GPUs and packages."""
    memory, disk = psutil.virtual_memory().total / 2**30, shutil.disk_usage(".").free / 2**30
    findings = [
        Finding("python", platform.python_version(), tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)),
        Finding("cpus", str(os.cpu_count()), True),
        Finding("memory", f"{memory:.0f} GiB", memory >= 4, "the tiny preset needs about 4 GiB"),
        Finding("free disk", f"{disk:.0f} GiB", disk >= 2, "the tiny preset needs about 2 GiB"),
        Finding("shared memory", *_shared_memory()),
    ]
    for distribution, module, purpose, remedy in _PACKAGES:
        version = _version(distribution, module)
        missing = "" if version else f"needed for {purpose}: {remedy}"
        findings.append(Finding(distribution, version or "missing", bool(version), missing))
    return [*findings, _gpus()]


def _shared_memory() -> tuple[str, bool, str]:
    if not os.path.isdir("/dev/shm"):
        return "no /dev/shm", True, "Ray keeps its objects in a temporary folder instead, which is slower"
    free = shutil.disk_usage("/dev/shm").free / 2**30
    remedy = "Ray's object store lies there: enlarge it, or lower cluster.object_store_bytes"
    return f"{free:.1f} GiB", free >= 0.5, remedy


def _version(distribution: str, module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent of a dotted name
        found = None
    return importlib.metadata.version(distribution) if found else None


def _gpus() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("gpus", "unknown without torch", True)
    from miles_core.device import device_names

    names = device_names()
    return Finding("gpus", ", ".join(names) or "none: training runs on the CPU, over gloo", True)


def doctor(json: Json = False) -> None:
    """Say what this machine can run and what is missing. Exit code 1 when something needed is missing."""
    findings = examine()
    needed = [f for f in findings if not f.ok and f.what not in _OPTIONAL]
    if json:
        print_json([asdict(f) for f in findings])
    else:
        table = Table("", "", "", "", box=None, show_header=False)
        for f in findings:
            mark = "[green]✓[/]" if f.ok else ("[yellow]-[/]" if f.what in _OPTIONAL else "[red]✗[/]")
            table.add_row(mark, f.what, f.found, "" if f.ok else f.remedy)
        out.print(table)
    if needed:
        raise typer.Exit(1)
