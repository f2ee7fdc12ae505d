r"""Compare the number in the answer with the ground truth, in any common notation.

The number of a text is the first of these that exists:

1. the number in the last \boxed{…} or after the last ####, whichever comes later;
2. the number on the line that follows the last "answer is";
3. the last number of the text.

If a marked line contains an equation, its right-hand side counts: "the answer is 3 * 4 = 12" is 12. Numbers are
compared as exact fractions: 0.1 is one tenth, and 1/3 equals 0.333 only with a tolerance. Nothing is evaluated.
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
"""Maximum number of characters of a number, so that a model's output cannot cause minutes of arithmetic."""

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
    """its value without the percent sign"""
    percent: bool = False
    """whether a percent sign follows"""


def check_options(*, tolerance: float = 0.0) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise TypeError(f"tolerance must be a number, got {tolerance!r}")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and not negative, got {tolerance!r}")


@register_reward("numeric", check=check_options)
def numeric(answer: Answer, *, tolerance: float = 0.0) -> float:
    """1 if the number of the answer equals that of the ground truth, else 0. An answer without a number is wrong.

    tolerance: largest absolute difference that counts as equal.

    A percentage equals both the number before the sign and a hundredth of it (50% equals 50 and 0.5). Two percentages
    are compared directly.
    """
    truth = _truth(answer.ground_truth)
    found = find_number(answer.text)
    if found is None:
        return 0.0
    allowed = Fraction(repr(tolerance))
    return float(any(abs(mine - right) <= allowed for mine, right in _readings(found, truth)))


def find_number(text: str) -> Number | None:
    """Return the number that the text gives as its answer; None if there is none."""
    marked = _explicit(text)
    if marked is not None:
        return _first(marked)
    said = list(_ANSWER_IS.finditer(text))
    number = _first(_line(text[said[-1].end() :])) if said else None
    return number or _last(text)


def _readings(found: Number, truth: Number) -> list[tuple[Fraction, Fraction]]:
    """Return the pairs of values to compare. The numbers are equal if one pair agrees."""
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
    """Return the text marked by the last closed box or the last ####, whichever comes later."""
    hashes = text.rfind("####")
    start, end = _last_box(text)
    if start > hashes:
        return text[start:end]
    return None if hashes < 0 else _line(text[hashes + 4 :])


def _last_box(text: str) -> tuple[int, int]:
    """Return the start and end of the content of the last closed box, or -1 for both, in one pass over the braces."""
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
    """Return the first line that is more than white space and punctuation."""
    return next((line for line in text.splitlines() if re.search(r"\w", line)), "")


def _first(marked: str) -> Number | None:
    """Return the first number after the last equals sign, or before it if no number follows."""
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
    """Return the value of a match; None if it is too long or divides by zero."""
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
