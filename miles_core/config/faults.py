"""Pydantic's validation errors in the words of a user of this project: value, rule, option."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


class FaultsError(ValueError):
    """Several faults that one check found, each a message of its own."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(self.faults))


MISSING = "is required"

# Pydantic's error type -> the rule, filled in from its context.
_RULES = {
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "multiple_of": "must be a multiple of {multiple_of:g}",
    "literal_error": "must be one of {expected}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "finite_number": "must be a finite number",
}
# The same by the beginning of the type, for families such as int_type, int_parsing, int_from_float.
_EXPECTED = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a table of options",
    "model": "must be a table of options",
}


def describe_faults(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One message a fault, each with the option's dotted path, the value found and the rule.

    `prefix` is put before each path, e.g. "data.task.params.".
    """
    faults: list[str] = []
    for details in error.errors():
        faults += _describe(details, model, prefix)
    return faults


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint `; did you mean X?`, or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(details: ErrorDetails, model: type[BaseModel], prefix: str) -> list[str]:
    kind, context = details["type"], details.get("ctx", {})
    path = ".".join(str(part) for part in details["loc"])
    if kind == "value_error":  # raised by a check of our own, which names the options itself
        cause = context["error"]
        return cause.faults if isinstance(cause, FaultsError) else [str(cause)]
    if kind == "extra_forbidden":
        return [f"unknown option {prefix}{path}{_nearest_option(details['loc'], model, prefix)}"]
    if kind == "missing":
        return [f"{prefix}{path} {MISSING}"]
    rule = _RULES.get(kind) or _EXPECTED.get(kind.split("_")[0])
    if rule is None:
        return [f"{prefix}{path} = {details['input']!r}: {details['msg']}"]
    return [f"{prefix}{path} = {details['input']!r}: {rule.format(**context)}"]


def _nearest_option(loc: Sequence[int | str], model: type[BaseModel], prefix: str) -> str:
    """A like name in the same section, else the same name in another section."""
    *sections, name = map(str, loc)
    section = _section_at(model, sections)
    where = ".".join([*sections, ""])
    if section is not None and (hint := nearest(name, section.model_fields)):
        return hint.replace("mean ", f"mean {prefix}{where}")
    elsewhere = [path for path in option_paths(model) if path.split(".")[-1] == name]
    return f"; did you mean {prefix}{elsewhere[0]}?" if elsewhere else ""


def _section_at(model: type[BaseModel], names: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for name in names:
        if section is None or name not in section.model_fields:
            return None
        section = section_type(section.model_fields[name].annotation)
    return section


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also where it may be null; None for a plain value."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def option_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of all options, those of sections inside included."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        paths += option_paths(section, f"{prefix}{name}.") if section is not None else [f"{prefix}{name}"]
    return paths
