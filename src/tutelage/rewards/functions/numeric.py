r"""The answer is a number, however it is written.

The number that counts is, in this order:

1. the one in the last \boxed{…} or after the last ####, whichever comes later;
2. the one on the line that follows the last "answer is";
3. the last number of the text.

Where a marked line holds an equation, its right-hand side counts: "the answer is 3 * 4 = 12" is 12. Numbers are
compared as exact fractions: 0.1 is one tenth, and 1/3 is not 0.333 unless a tolerance says so. Nothing is evaluated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Rational
from typing import Any

from tutelage.rewards.contract import Answer, register_reward

LONGEST = 400
"""Characters that one number may have: what a model writes must not turn into minutes of arithmetic."""

_NUMBER = re.compile(
    r"""
    (?<![A-Za-z\d]) (?<!\d\.)                         # not inside a word, a number or a version such as 1.2.3
    (?P<sign> (?<![\w)\]}%.]) [-+\u2212] )?          # a minus after a digit or a bracket is subtraction
    (?: \\?[$€£¥] \s? )?
    (?:
        (?P<whole> \d+ ) [ ] (?P<part> \d+/\d+ ) (?![/\d])
      | (?P<over> \d+ [ ]?/[ ]? \d+ ) (?! [/\d] | [.,]\d )
      | (?P<plain> (?: \d{1,3}(?:[,\u00a0\u2009\u202f]\d{3})+(?!\d) | \d+ ) (?:\.\d+)? | (?<![\w.])\.\d+ )
        (?: [eE] (?P<exponent> [-+]?\d{1,3} ) (?!\w) )?
    )
    (?P<percent> \s? (?: \\?% | percent\b ) )?
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*([-\u2212]?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_MIXED = re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)")
_POWER = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|[×x*])\s*10\s*\^\s*(\{)?\s*([-+\u2212]?\d{1,3})\s*(?(1)\}|(?!\d))")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_IS = re.compile(r"answer\s+is\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written."""

    value: Fraction
    """without regard to the percent sign"""
    percent: bool = False
    """a percent sign follows"""


def check_options(*, tolerance: float = 0.0) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise TypeError(f"tolerance must be a number, got {tolerance!r}")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and not negative, got {tolerance!r}")


@register_reward("numeric", check=check_options)
def numeric(answer: Answer, *, tolerance: float = 0.0) -> float:
    """1 if the answer's number is the ground truth's, else 0; no number is a wrong answer.

    tolerance: largest absolute difference that still counts as equal.

    A percentage equals the number before the sign and its hundredth alike (50% is 50, and 50% is 0.5); two
    percentages are compared as they are.
    """
    truth = _truth(answer.ground_truth)
    found = find_number(answer.text)
    if found is None:
        return 0.0
    allowed = Fraction(repr(tolerance))
    return float(any(abs(mine - right) <= allowed for mine, right in _readings(found, truth)))


def find_number(text: str) -> Number | None:
    """The number that the text gives as its answer; None if there is none."""
    marked = _explicit(text)
    if marked is not None:
        return _first(marked)
    said = list(_ANSWER_IS.finditer(text))
    number = _first(_line(text[said[-1].end() :])) if said else None
    return number or _last(text)


def _readings(found: Number, truth: Number) -> list[tuple[Fraction, Fraction]]:
    """Pairs of values of which one must agree."""
    pairs = [(found.value, truth.value)]
    if found.percent and not truth.percent:
        pairs.append((found.value / 100, truth.value))
    if truth.percent and not found.percent:
        pairs.append((found.value, truth.value / 100))
    return pairs


def _truth(ground_truth: Any) -> Number:
    if isinstance(ground_truth, str):
        number = find_number(ground_truth)
        if number is not None:
            return number
    elif isinstance(ground_truth, Rational | Decimal) and not isinstance(ground_truth, bool):
        return Number(Fraction(ground_truth))
    elif isinstance(ground_truth, float) and math.isfinite(ground_truth):
        return Number(Fraction(repr(float(ground_truth))))
    raise ValueError(f"the ground truth must be a number or text with a number, got {ground_truth!r}")


def _explicit(text: str) -> str | None:
    """What the last closed box or the last #### marks, whichever comes later."""
    hashes = text.rfind("####")
    start, end = _last_box(text)
    if start > hashes:
        return text[start:end]
    return None if hashes < 0 else _line(text[hashes + 4 :])


def _last_box(text: str) -> tuple[int, int]:
    """Where the content of the last closed box starts and ends; -1 if there is none. One pass over the braces."""
    boxes = {box.end() - 1 for box in _BOX.finditer(text)}
    opened: list[int] = []
    last = (-1, -1)
    for brace in re.finditer(r"[{}]", text) if boxes else ():
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in boxes:
            last = max(last, (start + 1, brace.start()))
    return last


def _line(text: str) -> str:
    """The first line that is more than white space and punctuation."""
    return next((line for line in text.splitlines() if re.search(r"\w", line)), "")


def _first(marked: str) -> Number | None:
    """The first number after the last equals sign, or before it if nothing follows."""
    for part in reversed(marked.split("=")):
        tidy = re.sub(r"^([-+\u2212])\s+", r"\1", part.strip(" \t$*:_`\"'"))
        number = next((number for number in map(_parsed, _NUMBER.finditer(_plain_notation(tidy))) if number), None)
        if number is not None:
            return number
    return None


def _last(text: str) -> Number | None:
    matches = list(_NUMBER.finditer(_plain_notation(text)))
    return next((number for number in map(_parsed, reversed(matches)) if number), None)


def _plain_notation(text: str) -> str:
    r"""\frac{3}{4} becomes 3/4, 1\frac{1}{2} becomes 1 1/2, 2 \times 10^3 becomes 2e3, 1{,}000 or 1\,000 1,000."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!;]|,\\!)(?=\d{3})", ",", text)
    text = _MIXED.sub(" ", text)
    text = _POWER.sub(lambda found: "e" + found[2].replace("\u2212", "-"), text)
    return _FRACTION.sub(lambda found: f"{found[1] or found[3]}/{found[2] or found[4]}", text)


def _parsed(match: re.Match[str]) -> Number | None:
    """The value of one match; None for what is too long or divides by zero."""
    if len(match[0]) > LONGEST:
        return None
    try:
        if match["whole"]:
            value = Fraction(match["whole"]) + Fraction(match["part"])
        elif match["over"]:
            value = Fraction(match["over"].replace(" ", ""))
        else:
            digits = re.sub(r"[,\u00a0\u2009\u202f]", "", match["plain"])
            value = Fraction(digits) * Fraction(10) ** int(match["exponent"] or 0)
    except ZeroDivisionError:
        return None
    return Number(-value if match["sign"] in ("-", "\u2212") else value, match["percent"] is not None)
