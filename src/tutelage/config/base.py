"""What every section of the settings is, and how a setting says that only some runs read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict


class ReadWhen(dict[str, tuple[Any, ...] | Callable[[Any], bool]]):
    """Marks a field, or a whole section, that is read only when other keys (dotted, from the root) say so.

    Each key comes with the values it may have, or with a test: `ReadWhen({"data.validation": bool})` is read when
    there is such a file. A section's value is the section; `teachers` is a dict; "" is the whole config. All keys must
    agree.
    """


class Rare:
    """Marks a field that `config show` lists only where it is set: its default says the same of many sections."""


ON_RAY = ReadWhen({"runtime": ("ray",)})


class Section(BaseModel):
    """Base of all settings: frozen, no unknown keys, finite numbers, docstrings under fields are their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
