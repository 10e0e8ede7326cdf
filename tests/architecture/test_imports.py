"""The direction of imports, and where each heavy library may appear."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "deployments", "miles_core", "conversion", "storage")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# package -> those of ours that it may import
ALLOWED = {
    "flows": {"tasks", "miles_core", "conversion", "storage"},
    "deployments": {"flows", "tasks", "miles_core", "storage"},
    "tasks": {"miles_core", "conversion", "storage"},
    "miles_core": {"conversion", "storage"},
    "conversion": set(),
    "storage": set(),
}
# library -> folders or files that may import it
CONFINED = {
    "prefect": ("flows/", "tasks/", "deployments/"),
    "ray": ("miles_core/cluster/",),
    "sglang": ("miles_core/rollout/sglang/",),
    "megatron": ("miles_core/trainer/megatron/", "conversion/torch_dist"),
}
LARGEST_FILE = 500


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, at whatever depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_one_way_and_libraries_stay_where_they_belong(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    tops = {module.split(".")[0] for module in imported_modules(path)}
    wrong = (tops & set(PACKAGES)) - ALLOWED[package] - {package}
    assert not wrong, f"{name(path)} imports {sorted(wrong)}, {package}/ may import {sorted(ALLOWED[package])}"
    for library, places in CONFINED.items():
        if library in tops:
            assert name(path).startswith(places), f"{name(path)} imports {library}, which belongs to {places}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LARGEST_FILE


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_device_is_named_in_one_place(path: Path) -> None:
    literals = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    if "cuda" in literals:
        assert name(path) in ("miles_core/device.py", "miles_core/trainer/megatron/cpu.py")


@pytest.mark.parametrize(
    "module",
    [
        "miles_core.config.load",
        "miles_core.config.preflight",
        "miles_core.types",
        "conversion.families",
        "flows.cli.app",
        "flows.post_training",
        "storage.store",
    ],
)
def test_what_runs_before_a_run_imports_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'ray', 'transformers', 'megatron'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
