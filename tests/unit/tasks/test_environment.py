"""Defaults stand before Prefect is imported, and never replace what the user has set."""

import os
import subprocess
import sys

import pytest

from tasks.environment import DEFAULTS


def environment_after_import(module: str, **given: str) -> dict[str, str]:
    code = f"import {module}, os; print(*(f'{{k}}={{v}}' for k, v in os.environ.items()), sep='\\n')"
    clean = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **given}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)


@pytest.mark.parametrize("module", ["tasks", "flows", "deployments"])
def test_packages_set_the_defaults(module: str) -> None:
    assert DEFAULTS.items() <= environment_after_import(module).items()


def test_what_the_user_has_set_wins() -> None:
    assert environment_after_import("flows", DO_NOT_TRACK="0")["DO_NOT_TRACK"] == "0"


def test_prefect_reads_them() -> None:
    code = "import flows; from prefect.settings import get_current_settings as s; print(s().flows.heartbeat_frequency)"
    clean = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    result = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == DEFAULTS["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
