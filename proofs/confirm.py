"""Confirm a record: run the first steps of its recipes again, and compare them with what the record says.

A record whose first steps repeat with the code of today, to the bit or to rounding, holds for this code too. One
that does not is run again as a whole.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutelage.config.measures import TIMES

STEPS = 3
"""Training steps of a run that its record keeps and a confirmation repeats."""
ROUNDING = 1e-3
"""Relative difference up to which two figures count as the same but for rounding."""

_RUN = """
import sys
from tutelage import loop
from tutelage.config.load import load
from tutelage.record.callbacks import STOP, Callbacks
steps, recipe, *overrides = sys.argv[1:]
loop.train(load(recipe, overrides).config, Callbacks(on_step=lambda step, _: STOP if step >= int(steps) else None))
"""
"""Trains a recipe for some steps; the learning-rate schedule is that of the whole run."""


@dataclass(frozen=True)
class Confirmed:
    """The result of a confirmation."""

    difference: float
    """largest relative difference of a figure; 0 if all bits are the same"""
    where: str = ""
    """the figure with that difference, with both values"""

    @property
    def holds(self) -> bool:
        return self.difference <= ROUNDING


def trace(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the figures that repeat: those of the first evaluation and of the first steps, without times."""
    return [_figures(row) for row in (*evaluations[:1], *steps[:STEPS])]


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith(TIMES)
    }


def compare(old: Sequence[Mapping[str, float]], new: Sequence[Mapping[str, float]]) -> Confirmed:
    """Compare two traces. A figure of the old one that the new one lacks differs infinitely; new ones do not count."""
    worst = Confirmed(0.0)
    for number, then in enumerate(old):
        now: Mapping[str, float] = new[number] if number < len(new) else {}
        for name, value in then.items():
            found = now.get(name, math.nan)
            if found == value or (math.isnan(found) and math.isnan(value) and name in now):
                continue
            apart = abs(found - value) / max(abs(value), abs(found), 1e-3)
            apart = math.inf if math.isnan(apart) else apart
            if apart > worst.difference:
                worst = Confirmed(apart, f"{name} of row {number + 1}: {value:.9g} then, {found:.9g} now")
    return worst


def confirm(record: Mapping[str, Any], root: Path, out: Path, python: str = sys.executable) -> Confirmed:
    """Run the first steps of every recipe of a record, once each, and compare. Raises LookupError if it cannot be
    repeated."""
    worst = Confirmed(0.0)
    seen: set[str] = set()
    for number, run in enumerate((*record["runs"], *record["control"])):
        words = shlex.split(run["command"])[2:]
        if words[0] in seen:
            continue
        seen.add(words[0])
        if not run.get("trace"):
            raise LookupError("its record has no trace")
        if missing := [w for w in words[1:] if re.search(r"=/", w) and not Path(w.partition("=")[2]).exists()]:
            raise LookupError(f"{missing[0]} does not exist any more")
        name = f"confirm-{number}"
        words = [str(len(run["trace"]) - 1), *words, f"out={out}", f"name={name}"]
        subprocess.run([python, "-c", _RUN, *words], cwd=root, check=True)
        rows = {
            kind: [json.loads(line) for line in (out / name / f"{kind}.jsonl").read_text().splitlines()]
            for kind in ("metrics", "validation")
        }
        found = compare(run["trace"], trace(rows["metrics"], rows["validation"]))
        worst = max(worst, found, key=lambda one: one.difference)
    return worst
