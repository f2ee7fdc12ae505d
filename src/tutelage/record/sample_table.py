"""Answers as a table, for tools that show tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tutelage.record.measures import number, printable
from tutelage.record.run_directory import EvalSample, RolloutRow

MOST_ROWS = 64
_MOST_CHARACTERS = 4000
Cell = str | float | None


@dataclass(frozen=True, slots=True)
class SampleTable:
    """One answer in each row: prompt and answer, then what there is of divergence, reward, the value of each reward
    function, advantage and finish."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, kept: Sequence[EvalSample | RolloutRow]) -> SampleTable:
        """At most MOST_ROWS answers. A column that would be empty in all rows is left out."""
        found = [_cells(one) for one in kept[:MOST_ROWS]]
        names = dict.fromkeys(name for cells in found for name in cells)
        used = tuple(name for name in names if any(cells.get(name) is not None for cells in found))
        return cls(used, tuple(tuple(cells.get(name) for name in used) for cells in found))

    def markdown(self) -> str:
        """The table in Markdown. What a model or a dataset wrote stays text."""
        rows = [[_markdown(cell) for cell in row] for row in (self.columns, *self.rows)]
        rows.insert(1, ["---"] * len(self.columns))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(kept: EvalSample | RolloutRow) -> Mapping[str, Cell]:
    cells: dict[str, Cell] = {
        "prompt": _text(kept.prompt),
        "answer": _text(kept.text),
        "divergence": _mean(kept.divergence),
        "reward": kept.reward,
        **{f"reward: {name}": value for name, value in kept.reward_parts.items()},
    }
    if isinstance(kept, RolloutRow):
        cells |= {"advantage": _mean(kept.advantage), "finish": kept.finish}
    return cells


def _text(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _mean(values: Sequence[float] | None) -> float | None:
    finite = [value for value in values or () if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _markdown(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return number(cell)
    marked = re.sub(r"([\\`*_{}\[\]()#+\-.!|~])", r"\\\1", escape(cell, quote=False))
    return marked.replace("\n", " ↵ ")
