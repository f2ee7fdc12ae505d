"""How values and changes of metrics are written, in the terminal and in the report alike. `config.measures` says what
each metric is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from tutelage.config.measures import PHASE, measure


def number(value: float) -> str:
    """About three significant digits, without needless zeros in front."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == 0 or (value == int(value) and size < 1000):
        return f"{value:.0f}"
    if size >= 1e6 or size < 1e-4:
        return scientific(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 0.01:
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"
    return f"{value:.2g}"


def scientific(value: float) -> str:
    """5e-5 rather than 5.00e-05."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def value_text(name: str, value: float) -> str:
    """A value of that metric."""
    if measure(name).change == "points" and math.isfinite(value):
        return f"{100 * value:.1f}%"
    return number(value)


def change_text(name: str, before: float, after: float) -> str:
    """From before to after, as this metric's changes are read."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return "–"
    kind = measure(name).change
    if kind == "points":
        return signed(100 * (after - before), "{:.1f} points")
    if kind == "difference":
        return signed(after - before)
    return signed(100 * (after - before) / before, "{:.0f}%") if before > 0 else "–"


def signed(value: float, form: str | None = None) -> str:
    """A number with its sign; ± if all its digits are zero."""
    text = number(abs(value)) if form is None else form.format(abs(value))
    if not any(digit in text for digit in "123456789"):
        return "±" + text
    return ("+" if value > 0 else "−") + text


def verdict(name: str, before: float, after: float) -> Literal["better", "worse", "same"]:
    """Whether the metric went where it should."""
    wanted = measure(name).better
    if wanted == "neither" or before == after or not (math.isfinite(before) and math.isfinite(after)):
        return "same"
    return "better" if (after < before) == (wanted == "lower") else "worse"


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase."""
    return {name.removeprefix(PHASE): value for name, value in metrics.items() if name.startswith(PHASE)}


def duration(seconds: float) -> str:
    """42 s, 3 min 05 s, 2 h 10 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def printable(text: str) -> str:
    """Text that a model wrote, made safe to show: control characters (they can drive a terminal) and lone surrogates
    (they cannot be encoded) become visible stand-ins; line breaks and tabs stay."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0x80 <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return "\ufffd"
    return character
