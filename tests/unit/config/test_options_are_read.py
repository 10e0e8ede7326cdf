"""An option that nothing reads is a promise that is not kept."""

import ast
from pathlib import Path

import pytest

from miles_core.config.faults import option_paths
from miles_core.config.run import RunConfig

ROOT = Path(__file__).parents[3]
PACKAGES = ("miles_core", "tasks", "flows", "conversion", "storage")


def attributes_read() -> set[str]:
    """Names of all attributes that are read outside the configuration's own definitions and checks."""
    names: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.parent != ROOT / "miles_core/config":
                nodes = ast.walk(ast.parse(path.read_text()))
                names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return names


# `transport` is read through RunConfig.weight_transport, which resolves auto.
READ = attributes_read() | ({"transport"} if "weight_transport" in attributes_read() else set())


@pytest.mark.parametrize("option", option_paths(RunConfig))
def test_every_option_has_a_reader(option: str) -> None:
    assert option.split(".")[-1] in READ, f"nothing reads {option}"
