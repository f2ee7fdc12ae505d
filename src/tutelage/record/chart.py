"""Curves and stacked bars as inline SVG. Colours are classes (s0, s1, …) of report.css; hovering is report.js.

Each chart carries its hover values as JSON in `data-hover`: [[x, y or null, "step 3", "kl 0.52"], …] in the units of
the view box, so that the script finds the nearest x and shows ready-made text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Literal

from tutelage.record.measures import number, printable, scientific

WIDTH, WIDE, HEIGHT = 420, 1300, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 12, 30
_CHARACTER, _GAP = 7.2, 7
"""Widest character of a tick label (.tick in report.css has 12px), and the space between label and axis."""
_MOST_POINTS = 400
_SMOOTH_FROM = 60
_MOST_DOTS = 30


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over steps. Values that are not finite are gaps."""

    name: str
    points: Sequence[tuple[int, float]]
    style: Literal["line", "marks"] = "line"
    """marks: few, separate measurements, such as evaluations"""
    colour: int = 0
    """number of a class in report.css: s0 to s6"""


@dataclass(frozen=True, slots=True)
class _Axes:
    """From data to the view box, with room for the labels at both ends."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int = WIDTH
    percent: bool = False

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        values = ticks(self.y_low, self.y_high, 5)
        return list(zip(values, tick_texts(values, self.percent), strict=True))

    @property
    def left(self) -> float:
        """Where the plot begins: right of the longest label."""
        return max(_LEFT, _GAP + _CHARACTER * max((len(text) for _, text in self.y_ticks), default=0))

    @property
    def right(self) -> float:
        """Where the plot ends: the label of the last step is centred there."""
        return self.width - max(_RIGHT, _CHARACTER * len(f"{self.x_high:,.0f}") / 2)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(label: str, series: Sequence[Series], *, percent: bool = False) -> str:
    """Curves over steps; "" if there is not one finite value. `label` describes the picture to a screen reader."""
    drawn = [replace(one, points=thinned(one.points)) for one in series]
    finite = [point for one in drawn for point in one.points if math.isfinite(point[1])]
    if not finite:
        return ""
    axes = _axes([x for x, _ in finite], [y for _, y in finite], percent=percent)
    body = [_frame(axes)]
    hover: dict[int, list[str]] = {}
    heights: dict[int, float] = {}
    for one in drawn:
        body.append(_marks(axes, one) if one.style == "marks" else _curve(axes, one))
        for x, y in one.points:
            if math.isfinite(y):
                hover.setdefault(x, []).append(f"{one.name} {_value(y, percent)}")
                heights.setdefault(x, round(axes.y(y), 1))
    rows = [[round(axes.x(x), 1), heights[x], f"step {x:,}", *lines] for x, lines in sorted(hover.items())]
    return _svg(axes, label, "".join(body), rows)


def stacked_chart(label: str, series: Sequence[Series]) -> str:
    """Wide bars over steps, one part on top of the other in the order given; a missing value is nothing."""
    steps = sorted({x for one in series for x, _ in one.points})
    filled = [{**dict.fromkeys(steps, 0.0), **{x: _positive(y) for x, y in one.points}} for one in series]
    columns = [dict(thinned(sorted(column.items()))) for column in filled]
    stacks = {x: [column[x] for column in columns] for x in columns[0]} if columns else {}
    if not any(value for stack in stacks.values() for value in stack):
        return ""
    xs = list(stacks)
    apart = min((b - a for a, b in pairwise(xs)), default=1)
    axes = _axes([xs[0] - apart / 2, xs[-1] + apart / 2], [0.0, *(sum(stack) for stack in stacks.values())], WIDE)
    bar_width = min(56.0, (axes.x(apart) - axes.x(0)) * (0.8 if len(xs) <= 100 else 1.1))
    colours = [one.colour for one in series]
    bars = "".join(_bar(axes, x, zip(colours, stack, strict=True), bar_width) for x, stack in stacks.items())
    rows = [
        [
            round(axes.x(x), 1),
            None,
            f"step {x:,}",
            *(f"{one.name} {number(value)}" for one, value in zip(series, stack, strict=True) if value),
            f"total {number(sum(stack))}",
        ]
        for x, stack in stacks.items()
    ]
    return _svg(axes, label, _frame(axes) + bars, rows)


def _bar(axes: _Axes, x: float, stack: Iterable[tuple[int, float]], width: float) -> str:
    parts, base = [], 0.0
    for colour, value in stack:
        top, bottom = axes.y(base + value), axes.y(base)
        if value > 0:
            parts.append(
                f'<rect class="bar s{colour}" x="{axes.x(x) - width / 2:.1f}" y="{top:.1f}" '
                f'width="{width:.1f}" height="{bottom - top:.1f}"/>'
            )
        base += value
    return "".join(parts)


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most a few hundred points: longer runs are averaged over equal stretches, each at its last step."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    result = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [y for _, y in stretch if math.isfinite(y)]
        result.append((stretch[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return result


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / apart - 1e-9)
    return [tick * apart for tick in range(first, math.floor(high / apart + 1e-9) + 1)]


def _axes(xs: Sequence[float], ys: Sequence[float], width: int = WIDTH, *, percent: bool = False) -> _Axes:
    """Room for the data; the value axis starts at zero unless that would flatten the curve."""
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    low, high = min(ys), max(ys)
    span = (high - low) or abs(high) or 1.0
    y_low = 0.0 if 0 <= low < 0.6 * high or low == high == 0 else low - 0.08 * span
    return _Axes(x_low, x_high, y_low, high + 0.08 * span, width, percent)


def _frame(axes: _Axes) -> str:
    left, right, floor = f"{axes.left:.1f}", f"{axes.right:.1f}", HEIGHT - _BOTTOM
    parts = []
    for tick, text in axes.y_ticks:
        y, at = axes.y(tick), axes.left - _GAP
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    for tick in ticks(axes.x_low, axes.x_high, axes.width // 70):
        if tick == int(tick):
            x = axes.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{int(tick):,}</text>')
    return "".join(parts)


def tick_texts(values: Sequence[float], percent: bool) -> list[str]:
    """All ticks of an axis with the same number of digits, as many as they need to differ."""
    scaled = [100 * value for value in values] if percent else list(values)
    largest = max((abs(value) for value in scaled), default=0.0)
    if len(scaled) < 2 or largest >= 1e6 or largest < 1e-2:
        return [scientific(value) for value in scaled]
    digits = max(0, -math.floor(math.log10(scaled[1] - scaled[0]) + 1e-9))
    return [f"{value:,.{digits}f}" + ("%" if percent else "") for value in scaled]


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}%" if percent else number(value)


def _curve(axes: _Axes, series: Series) -> str:
    """A line with gaps where values are missing; long ones are smoothed, with the measured curve faint behind."""
    points, colour = series.points, series.colour
    smooth = len(points) >= _SMOOTH_FROM
    parts = [f'<path class="curve s{colour}{" raw" if smooth else ""}" d="{_path(axes, points)}"/>']
    if smooth:
        parts.append(f'<path class="curve s{colour}" d="{_path(axes, _smoothed(points))}"/>')
    if len(points) <= _MOST_DOTS:
        parts += [
            f'<circle class="dot s{colour}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.4"/>'
            for x, y in points
            if math.isfinite(y)
        ]
    return "".join(parts)


def _path(axes: _Axes, points: Sequence[tuple[int, float]]) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            parts.append(f"{pen}{axes.x(x):.1f} {axes.y(y):.1f}")
        pen = "L" if math.isfinite(y) else "M"
    return "".join(parts)


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Mean over a centred window of a tenth of the curve."""
    reach = max(1, len(points) // 20)
    result = []
    for i, (x, y) in enumerate(points):
        window = [value for _, value in points[max(0, i - reach) : i + reach + 1] if math.isfinite(value)]
        result.append((x, sum(window) / len(window) if window and math.isfinite(y) else math.nan))
    return result


def _marks(axes: _Axes, series: Series) -> str:
    """A diamond per measurement, joined by a dashed line; too many to tell apart are a plain line."""
    colour = series.colour
    if len(series.points) > _MOST_DOTS:
        return f'<path class="curve s{colour}" d="{_path(axes, series.points)}"/>'
    parts = [f'<path class="curve dashed s{colour}" d="{_path(axes, series.points)}"/>']
    for x, y in series.points:
        if math.isfinite(y):
            left, top = axes.x(x), axes.y(y)
            parts.append(f'<path class="dot s{colour}" d="M{left:.1f} {top - 4.5:.1f}l4.5 4.5l-4.5 4.5l-4.5-4.5z"/>')
    return "".join(parts)


def _positive(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _svg(axes: _Axes, label: str, body: str, hover: Sequence[Sequence[object]]) -> str:
    data = escape(json.dumps(hover, separators=(",", ":")))
    return (
        f'<svg class="chart" viewBox="0 0 {axes.width} {HEIGHT}" role="img" aria-label="{escape(printable(label))}" '
        f'data-hover="{data}" data-top="{_TOP}" data-floor="{HEIGHT - _BOTTOM}">{body}</svg>'
    )
