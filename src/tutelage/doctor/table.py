"""The table of `tutelage doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tutelage.doctor.result import CheckResult, CheckSection, CheckStatus

STYLES: dict[CheckStatus, str] = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "undecided": "cyan",
    "skipped": "dim",
}
WIDE = 100
"""Line width for output to a pipe or file."""


def show(results: Sequence[CheckResult], console: Console | None = None) -> None:
    """Print the checks by section, each with what was found and, after an arrow, what to do."""
    console = console if console is not None else _console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("status", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("model", max_width=20)
    table.add_column("found, and → what to do", ratio=1)
    for section in get_args(CheckSection):
        rows = [result for result in results if result.section == section]
        if rows:
            table.add_row("", Text(section, style="bold"), "", "")
        for result in rows:
            said = Text(result.found, style="dim" if result.status == "skipped" else "")
            if result.todo:
                said.append(f"\n→ {result.todo}", style=STYLES[result.status])
            table.add_row(Text(result.status, style=STYLES[result.status]), Text(result.name), Text(result.about), said)
    console.print(table)
    console.print(Text(verdict(results)), soft_wrap=True)


def verdict(results: Sequence[CheckResult]) -> str:
    """Return the last line of the output."""
    counts = Counter(result.status for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in get_args(CheckStatus) if counts[status])


def as_json(results: Sequence[CheckResult]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)
