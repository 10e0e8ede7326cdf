"""From preset, file and overrides to a `RunConfig`, with every fault at once. No torch."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles_core.config.faults import MISSING, FaultsError, describe_faults, nearest, option_paths, section_type
from miles_core.config.run import RunConfig

_PRESETS = files("miles_core.config") / "presets"

# Setting one of them in a later layer (file, then --set) takes the others back.
_ALTERNATIVES = (("model", "path", "random"), ("data", "task", "prompts", "conversations"))


# annotated_types' names of bounds -> how they are shown
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}


class ConfigError(FaultsError):
    """All faults of a configuration. `str()` lists them, one a line."""

    def __str__(self) -> str:
        return "\n".join(self.faults)


@dataclass(frozen=True)
class OptionRow:
    """One option, as shown by `miles config fields`."""

    path: str
    type: str
    default: Any  # None where there is none: then the type says so
    doc: str


def preset_names() -> list[str]:
    """Names that `load_config` takes."""
    return sorted(entry.name.removesuffix(".toml") for entry in _PRESETS.iterdir() if entry.name.endswith(".toml"))


def load_config(preset: str | None, file: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The preset, then the TOML or JSON file laid over it, then the overrides `section.option=value`.

    A value is read as TOML, else as JSON (`null`), else as text; for a text option it is always text. Raises
    `ConfigError` with all faults.
    """
    faults: list[str] = []
    values: dict[str, Any] = {}
    for layer in (_read_preset(preset, faults), _read_file(file, faults), _read_overrides(overrides, faults)):
        _drop_alternatives(values, layer)
        _merge(values, layer)
    unread = bool(faults)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        # What a preset or file that could not be read would have set is not missing.
        faults += [fault for fault in describe_faults(error, RunConfig) if not (unread and fault.endswith(MISSING))]
        raise ConfigError(faults) from None
    if faults:
        raise ConfigError(faults)
    return config


def describe_fields() -> list[OptionRow]:
    """Every option in the order of its sections."""
    rows = []
    for path in option_paths(RunConfig):
        field = _field_at(path.split("."))
        assert field is not None
        rows.append(OptionRow(path, _type_text(field), _default(field), " ".join((field.description or "").split())))
    return rows


def _read_preset(name: str | None, faults: list[str]) -> dict[str, Any]:
    if name is None:
        return {}
    known = preset_names()
    if name not in known:
        faults.append(f"unknown preset {name!r}, there are {', '.join(known)}{nearest(name, known)}")
        return {}
    return tomllib.loads((_PRESETS / f"{name}.toml").read_text())


def _read_file(file: Path | None, faults: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        text = file.read_text()
        loaded = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        faults.append(f"configuration file {file}: {error.strerror}")
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(f"configuration file {file}: {error}")
    else:
        if isinstance(loaded, dict):
            return loaded
        faults.append(f"configuration file {file}: an object is required, found {type(loaded).__name__}")
    return {}


def _read_overrides(overrides: Iterable[str], faults: list[str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            faults.append(f"--set {override}: must be written section.option=value")
            continue
        nested: Any = _read_value(text.strip(), names)
        for name in reversed(names):
            nested = {name: nested}
        _merge(layer, nested)
    return layer


def _read_value(text: str, names: Sequence[str]) -> Any:
    field = _field_at(names)
    is_text = field is not None and field.annotation in (str, str | None)
    if is_text and text != "null" and not text.startswith(('"', "'")):
        return text  # a commit hash may look like a number
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"]
    with suppress(json.JSONDecodeError):  # knows null and objects of several lines
        return json.loads(text)
    return text


def _drop_alternatives(values: dict[str, Any], layer: dict[str, Any]) -> None:
    for section, *names in _ALTERNATIVES:
        below, above = values.get(section), layer.get(section)
        if isinstance(below, dict) and isinstance(above, dict):
            chosen = [name for name in names if above.get(name) is not None]
            for name in set(names) - set(chosen) if chosen else ():
                below.pop(name, None)


def _merge(values: dict[str, Any], layer: dict[str, Any]) -> None:
    for name, value in layer.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _field_at(names: Sequence[str]) -> FieldInfo | None:
    section: type[BaseModel] | None = RunConfig
    field = None
    for name in names:
        if section is None or name not in section.model_fields:
            return None
        field = section.model_fields[name]
        section = section_type(field.annotation)
    return field


def _type_text(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(rule, name)
    ]
    required = ["required"] if field.is_required() else []
    return ", ".join([_annotation_text(field.annotation), *bounds, *required])


def _annotation_text(annotation: Any) -> str:
    arguments = get_args(annotation)
    if annotation is type(None):
        return "null"
    if not arguments:
        return str(getattr(annotation, "__name__", annotation))
    if all(isinstance(argument, str) for argument in arguments):  # Literal
        return " | ".join(arguments)
    origin = get_origin(annotation)
    if origin in (tuple, dict):
        inner = ", ".join(_annotation_text(argument) for argument in arguments if argument is not Ellipsis)
        return f"{origin.__name__}[{inner}]"
    return " | ".join(_annotation_text(argument) for argument in arguments)


def _default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default
