"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "warn", "fail", "undecided", "skipped"]
"""`warn` may be meant; `fail` makes the run wrong or pointless; `undecided` needs more data than was looked at;
`skipped` does not apply to this recipe, or another failure prevents it."""
CheckSection = Literal["student and teachers", "data", "machine", "engines", "signal"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One row of the table."""

    section: CheckSection
    name: str
    status: CheckStatus
    found: str
    """what was found, with numbers"""
    todo: str = ""
    """what to do about it; empty if nothing has to be done"""
    about: str = ""
    """the model that was checked, by its key in the recipe"""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.about})" if self.about else self.name
