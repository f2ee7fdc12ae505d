"""The base class of all sections, and the markers that say when a setting is read or shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict


class ReadWhen(dict[str, tuple[Any, ...] | Callable[[Any], bool]]):
    """Mark a field or section that is read only if other settings have certain values.

    Keys are dotted paths from the root. Each maps to a tuple of allowed values or to a predicate:
    `ReadWhen({"data.validation": bool})` is read if data.validation is set. The value of a section is the section
    itself, `teachers` is a dict, and "" is the whole config. All conditions must hold.
    """


class Rare:
    """Mark a field that `config show` lists only if it is set, because its default would repeat in many sections."""


ON_RAY = ReadWhen({"runtime": ("ray",)})


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, with finite numbers only. The docstring under a field is its
    description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
