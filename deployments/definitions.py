"""The deployments as prefect.yaml defines them, with a preset as their parameters."""

import argparse
from pathlib import Path
from typing import Any

import yaml

from miles_core.config.load import load_config, preset_names
from miles_core.config.run import RunConfig
from tasks.environment import DEFAULTS

PREFECT_FILE = Path(__file__).parents[1] / "prefect.yaml"


def read_definitions(config: RunConfig) -> dict[str, Any]:
    """prefect.yaml, where the whole of `config` is the default of every deployment's run form."""
    definitions: dict[str, Any] = yaml.safe_load(PREFECT_FILE.read_text())
    for deployment in definitions["deployments"]:
        deployment["parameters"] = {"config": config.model_dump(mode="json")}
        # A run's process imports Prefect before anything of ours, so it must start with these.
        deployment["work_pool"]["job_variables"] = {"env": DEFAULTS}
    return definitions


def config_of_command_line(module: str, description: str, arguments: list[str] | None) -> RunConfig:
    """The preset that a command of this package was called with."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--preset", default="tiny", choices=preset_names(), help="default of the run forms")
    return load_config(parser.parse_args(arguments).preset, None, ())
