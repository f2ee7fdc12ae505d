"""Which engine served which request when: the files in `timeline/` of a run on Ray, and a chart of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Literal

from tutelage.record.measures import duration, printable

WIDTH, LANE, AXIS = 1300, 22, 22
_CHARACTER = 7.2
"""Widest character of a label (.tick in report.css has 12px)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One request of one engine, in seconds since the epoch."""

    engine: str
    kind: Literal["generate", "score"]
    key: str
    """partition/prompt/sample/attempt of the episode, and what follows"""
    start: float
    end: float

    @property
    def episode(self) -> tuple[str, ...]:
        return tuple(self.key.split("/")[:4])


INTERVAL = tuple(field.name for field in fields(Interval))
"""Keys of a line of the file, besides its step."""


def overlaps(intervals: Sequence[Interval]) -> int:
    """Scores that were under way while an episode other than their own was being written."""
    written = [interval for interval in intervals if interval.kind == "generate"]
    return sum(
        any(w.start < s.end and s.start < w.end and w.episode != s.episode for w in written)
        for s in intervals
        if s.kind == "score"
    )


def lanes_chart(label: str, intervals: Sequence[Interval]) -> str:
    """Draw a lane for each engine and a bar for each request, darker where requests overlap; "" without requests."""
    if not intervals:
        return ""
    engines = sorted({i.engine for i in intervals}, key=lambda name: (not name.startswith("student"), name))
    first, last = min(i.start for i in intervals), max(i.end for i in intervals)
    left = round(20 + _CHARACTER * max(len(name) for name in engines))
    scale = (WIDTH - left - 20) / max(last - first, 1e-6)
    height = len(engines) * LANE + AXIS
    body = [
        f'<text class="tick" x="{left - 10}" y="{lane * LANE + 15}" text-anchor="end">{escape(printable(name))}</text>'
        for lane, name in enumerate(engines)
    ]
    for interval in intervals:
        x, y = left + (interval.start - first) * scale, engines.index(interval.engine) * LANE + 4
        width = max((interval.end - interval.start) * scale, 1.0)
        colour = 0 if interval.kind == "generate" else 1
        what = f"{interval.kind} {interval.key}: {duration(interval.end - interval.start)}"
        body.append(
            f'<rect class="bar s{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 8}" opacity="0.45">'
            f"<title>{escape(printable(what))}</title></rect>"
        )
    ends = ((left, "start", "0"), (WIDTH - 20, "end", duration(last - first)))
    body += [
        f'<text class="tick" x="{x}" y="{height - 5}" text-anchor="{side}">{escape(text)}</text>'
        for x, side, text in ends
    ]
    box = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"'
    return f'<svg class="chart" {box}>{"".join(body)}</svg>'
