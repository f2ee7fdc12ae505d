"""Match the answer against regular expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from tutelage.rewards.contract import Answer, register_reward


def check_options(*, patterns: str | Sequence[str], whole: bool = False, require: str = "all") -> None:
    listed = _listed(patterns)
    if not listed or not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"patterns must be a regular expression or a list of at least one, got {patterns!r}")
    wrong = []
    for pattern in listed:
        try:
            re.compile(pattern)
        except re.error as error:
            wrong.append(f"{pattern!r} is not a regular expression: {error}")
    if not isinstance(whole, bool):
        wrong.append(f"whole must be true or false, got {whole!r}")
    if require not in ("all", "any"):
        wrong.append(f"require must be 'all' or 'any', got {require!r}")
    if wrong:
        raise ValueError("; ".join(wrong))


@register_reward("pattern", check=check_options)
def pattern(
    answer: Answer, *, patterns: str | Sequence[str], whole: bool = False, require: Literal["all", "any"] = "all"
) -> float:
    """1 if the text matches, else 0. The ground truth is not used.

    patterns: one or more regular expressions. Flags are written inline: `(?is)` ignores case and lets a dot match line
    ends.
    whole: the pattern must match the whole text; by default, it may match anywhere.
    require: whether `all` patterns must match, or `any` of them.
    """
    find = re.fullmatch if whole else re.search
    found = (find(each, answer.text) is not None for each in _listed(patterns))
    return float(all(found) if require == "all" else any(found))


def _listed(patterns: str | Sequence[str]) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns
