"""Puts runs side by side, from their directories alone: settings that differ, measures before and after training, and
the metrics of the last step. `compare` reads, `show` draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tutelage.config.measures import MEASURES, in_order, measure
from tutelage.record.measures import change_text, printable, value_text
from tutelage.record.report_data import before_after, flattened, load_config
from tutelage.record.run_directory import RunDirectory

_OF_THE_RUN = ("name", "out")
"""Settings that say which run it is, not what it does."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """What is compared of one run."""

    title: str
    step: int
    """the last one that is recorded"""
    finished: bool
    settings: Mapping[str, Any]
    """by dotted key"""
    before: Mapping[str, float]
    after: Mapping[str, float]
    """empty until there is a second evaluation"""
    last: Mapping[str, float]
    """metrics of the last step"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs in the order in which they were given."""

    runs: tuple[ComparedRun, ...]

    @property
    def differing(self) -> list[str]:
        """Keys of settings that are not the same in all runs. A key that a run does not have differs too."""
        keys = dict.fromkeys(key for run in self.runs for key in run.settings if key not in _OF_THE_RUN)
        return [key for key in keys if len({shown(run.settings, key) for run in self.runs}) > 1]

    @property
    def measured(self) -> list[str]:
        """Names of held-out measures that any run has."""
        return in_order(name for run in self.runs for name in (*run.before, *run.after))

    @property
    def trained(self) -> list[str]:
        """Names of the main metrics of training that any run has."""
        return in_order(name for run in self.runs for name in run.last if name in MEASURES)


def compare(paths: Sequence[Path]) -> Comparison:
    """Read the runs in these directories; UserError for one that holds none."""
    runs = [RunDirectory.open(path) for path in paths]
    names = Counter(run.name for run in runs)
    titles = [run.name if names[run.name] == 1 else str(run.path) for run in runs]
    return Comparison(tuple(_read(run, title) for run, title in zip(runs, titles, strict=True)))


def _read(run: RunDirectory, title: str) -> ComparedRun:
    config, metrics, summary = load_config(run), run.load_metrics(), run.load_summary()
    before, after = before_after(run.load_validations(), summary)
    return ComparedRun(
        title=title,
        step=metrics[-1].step if metrics else 0,
        finished=bool(summary),
        settings=dict(flattened(config)) if isinstance(config, Mapping) else {},
        before=before,
        after=after,
        last=metrics[-1].metrics if metrics else {},
    )


def shown(settings: Mapping[str, Any], key: str) -> str:
    """A setting as the comparison prints it; – where a run does not have it."""
    return str(settings[key]) if key in settings else "–"


def show(comparison: Comparison, console: Console) -> None:
    """Print one table for the settings, one for the measures and one for the last training step."""
    runs = comparison.runs
    states = {"last step": [f"{run.step}{'' if run.finished else ', not finished'}" for run in runs]}
    _print(console, "Runs", runs, states, "")
    settings = {key: [shown(run.settings, key) for run in runs] for key in comparison.differing}
    _print(console, "Settings that differ", runs, settings, "None: all settings are the same.")
    measured = {_label(name): [_change(name, run) for run in runs] for name in comparison.measured}
    _print(console, "Held-out measures, before → after (change)", runs, measured, "No evaluation is recorded.")
    trained = {_label(name): [_value(name, run.last) for run in runs] for name in comparison.trained}
    _print(console, "Training, last step", runs, trained, "No training step is recorded.")


def _print(
    console: Console, title: str, runs: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]], without: str
) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    if not rows:
        console.print(without)
        return
    table = Table(show_edge=False)
    for heading in ("", *(run.title for run in runs)):
        table.add_column(Text(printable(heading)), overflow="fold")
    for name, cells in rows.items():
        table.add_row(Text(printable(name)), *(Text(printable(cell)) for cell in cells))
    console.print(table)


def _label(name: str) -> str:
    known = measure(name)
    return f"{known.label} ({known.unit})" if known.unit else known.label


def _value(name: str, values: Mapping[str, float]) -> str:
    return value_text(name, values[name]) if name in values else "–"


def _change(name: str, run: ComparedRun) -> str:
    """before → after (change), as far as there is that much."""
    if not run.after:
        return _value(name, run.before)
    both = f"{_value(name, run.before)} → {_value(name, run.after)}"
    if name not in run.before or name not in run.after:
        return both
    return f"{both} ({change_text(name, run.before[name], run.after[name])})"
