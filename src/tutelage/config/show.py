"""The output of `tutelage config show`: the settings that a run reads and where each value came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic.fields import FieldInfo

from tutelage.config.base import Rare, ReadWhen
from tutelage.config.explain import description
from tutelage.config.load import Loaded, leaves
from tutelage.config.schema import RunConfig
from tutelage.config.tree import DEFAULT, inline_yaml

if TYPE_CHECKING:
    from rich.table import Table


class SettingRow(NamedTuple):
    """One setting of a run."""

    key: str
    value: Any
    origin: str
    description: str


def show(loaded: Loaded) -> list[SettingRow]:
    """Return the settings that this run reads, in schema order. Settings that other settings make irrelevant are
    omitted, and so are `Rare` ones that have their defaults."""
    return [
        SettingRow(".".join(path), value, loaded.origins[".".join(path)], description(fields[-1]))
        for path, value, fields in leaves(loaded.config)
        if all(_is_read(field, loaded.config) for field in fields)
        and not (loaded.origins[".".join(path)] == DEFAULT and any(isinstance(m, Rare) for m in fields[-1].metadata))
    ]


def plain(rows: Sequence[SettingRow]) -> str:
    """Format each setting as a line `key = value  # origin`."""
    settings = [f"{row.key} = {inline_yaml(row.value)}" for row in rows]
    width = max((len(setting) for setting in settings if len(setting) <= 60), default=0)
    return "\n".join(f"{setting:<{width}}  # {row.origin}" for setting, row in zip(settings, rows, strict=True))


def table(rows: Sequence[SettingRow], *, descriptions: bool = True) -> Table:
    """Return a table for the terminal, with defaults dimmed."""
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, header_style="bold")
    result.add_column("key", no_wrap=True)
    result.add_column("value", overflow="fold")
    result.add_column("origin", overflow="fold")
    if descriptions:
        result.add_column("what it is", ratio=1)
    for row in rows:
        cells = (row.key, inline_yaml(row.value), row.origin, row.description)[: len(result.columns)]
        result.add_row(*(Text(cell) for cell in cells), style="dim" if row.origin == DEFAULT else "")
    return result


def _is_read(field: FieldInfo, config: RunConfig) -> bool:
    conditions = [marker for marker in field.metadata if isinstance(marker, ReadWhen)]
    return all(_holds(expected, _value(config, key)) for condition in conditions for key, expected in condition.items())


def _holds(expected: Any, value: Any) -> bool:
    return bool(expected(value)) if callable(expected) else value in expected


def _value(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key; "" is the whole config."""
    value: Any = config
    for name in key.split(".") if key else ():
        value = value[name] if isinstance(value, dict) else value.__dict__[name]
    return value
