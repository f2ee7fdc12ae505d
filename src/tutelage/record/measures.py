"""How metrics are named, written and compared, in the terminal and in the report alike.

Names that the record knows: kl, kl_fixed, loss, top1_agreement, entropy, length, grad_norm, lr, tokens_per_second, and
seconds/<phase> for the time of a phase of a step. Any other name is shown too, as a plain number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tutelage.config.measures import DIRECTIONS, Better

PHASE = "seconds/"
"""prefix of phase times"""


@dataclass(frozen=True, slots=True)
class Measure:
    """How one metric is shown."""

    title: str
    unit: str = ""
    change: Literal["percent", "points", "difference"] = "difference"
    """points: the metric is a share, shown in percent"""


_KNOWN = {
    "reward": Measure("Reward"),
    "accuracy": Measure("Accuracy", "", "points"),
    "gold_accuracy": Measure("Accuracy, independent judge", "", "points"),
    "kl": Measure("KL(student‖teacher)", "nats/token", "percent"),
    "kl_fixed": Measure("KL(teacher‖student), fixed text", "nats/token", "percent"),
    "top1_agreement": Measure("Top-1 agreement", "", "points"),
    "loss": Measure("Loss", "", "percent"),
    "entropy": Measure("Entropy", "nats/token"),
    "length": Measure("Answer length", "tokens"),
    "explained_variance": Measure("Explained variance of the critic"),
    "grad_norm": Measure("Gradient norm"),
    "lr": Measure("Learning rate"),
    "tokens_per_second": Measure("Throughput", "tokens/s"),
    "pictures_per_second": Measure("Throughput", "pictures/s"),
}


def measure(name: str) -> Measure:
    """How to show the metric of that name."""
    return _KNOWN.get(name, Measure(name))


def better(name: str) -> Better:
    """Which way the metric should go; a recipe's own rewards are not judged here."""
    return DIRECTIONS.get(name, "neither")


def in_order(names: Iterable[str]) -> list[str]:
    """Well-known metrics first, the others by name."""
    known = list(_KNOWN)
    return sorted(set(names), key=lambda name: (known.index(name) if name in _KNOWN else len(known), name))


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
        return _signed(100 * (after - before), "{:.1f} points")
    if kind == "difference":
        return _signed(after - before, None)
    return _signed(100 * (after - before) / before, "{:.0f}%") if before > 0 else "–"


def _signed(value: float, form: str | None) -> str:
    text = number(abs(value)) if form is None else form.format(abs(value))
    if not any(digit in text for digit in "123456789"):
        return "±" + text
    return ("+" if value > 0 else "−") + text


def verdict(name: str, before: float, after: float) -> Literal["better", "worse", "same"]:
    """Whether the metric went where it should."""
    wanted = better(name)
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
