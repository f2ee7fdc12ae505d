"""The table of `tutelage certify`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tutelage.certify.judge import Row

WIDE = 220
"""Line width for output to a pipe or file, which shows whole notes."""
NOTES = 150
"""Minimum line width for showing notes."""
NUMBERS = ("bias", "other", "passed")


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one line per row, followed by the failures."""
    console = console if console is not None else _console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("objective", "payload", "form", "target", "exact", *NUMBERS):
        widest = max([len(name), *(len(_cells(row)[name]) for row in rows)])
        least = None if name == "form" else widest
        table.add_column(name, no_wrap=True, justify="right" if name in NUMBERS else "left", min_width=least)
    if console.width >= NOTES:
        table.add_column("note", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        cells = list(_cells(row).values())[: len(table.columns)]
        table.add_row(*(Text(cell) for cell in cells), style="" if row.passed else "bold red")
    console.print(table)
    for row in rows:
        for check, reason in row.reasons.items():
            console.print(Text(f"{_name(row)}: {check}: {reason}", style="red"), soft_wrap=True)
    console.print(Text(verdict(rows)), soft_wrap=True)


def verdict(rows: Sequence[Row]) -> str:
    """Return the last line of the output."""
    failed = sum(not row.passed for row in rows)
    return f"{failed} of {len(rows)} failed" if failed else f"{len(rows)} rows, all passed"


def _name(row: Row) -> str:
    return " / ".join((row.objective, row.payload, _form(row)))


def _form(row: Row) -> str:
    return row.form if row.discount is None else f"{row.form}, discount {row.discount}"


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def _cells(row: Row) -> dict[str, str]:
    return {
        "objective": row.objective,
        "payload": row.payload,
        "form": _form(row),
        "target": row.target,
        "exact": "yes" if row.exact else "no",
        "bias": _number(row.bias),
        "other": _number(row.bias_other),
        "passed": f"{sum(row.checks.values())}/{len(row.checks)}",
        "note": row.note,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value < 1e-3 or value >= 1e3 else f"{value:.3f}"
