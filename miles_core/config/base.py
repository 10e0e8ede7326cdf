"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Immutable, and closed: an unknown field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
