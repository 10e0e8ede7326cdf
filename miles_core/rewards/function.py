"""`function`: a scorer of the user's own, named `package.module:name`."""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from miles_core.types import Prompt, Score


class FunctionReward:
    """Calls `function(prompt, response, label, metadata) -> float` with the rendered prompt as text."""

    def __init__(self, path: str) -> None:
        self._function = load_function(path)

    def __call__(self, prompt: Prompt, response: str) -> Score:
        return Score(self._function(prompt.text, response, prompt.label, prompt.metadata))


def load_function(path: str) -> Any:
    """Imports the function; modules are searched in the working folder, too. Raises ValueError."""
    module_name, name = split_path(path)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ValueError(f"reward.function {path!r}: module {module_name} can not be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"reward.function {path!r}: module {module_name} has no {name}") from error
    if not callable(function):
        raise ValueError(f"reward.function {path!r} is a {type(function).__name__}, a function is required")
    return function


def split_path(path: str) -> tuple[str, str]:
    """Module and name of `package.module:name`. Raises ValueError."""
    module, colon, name = path.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"reward.function {path!r} must be written package.module:name")
    return module, name


def find_module(name: str) -> bool:
    """Whether a module is there, found out without running any of its code or that of its packages."""
    return _module_spec(name) is not None


def module_file(name: str) -> Path | None:
    """The file of a module's code; None where there is none. Runs none of it."""
    spec = _module_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _module_spec(name: str) -> ModuleSpec | None:
    search: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for depth in range(name.count(".") + 1):
        spec = PathFinder.find_spec(".".join(name.split(".")[: depth + 1]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or ())
    return spec
