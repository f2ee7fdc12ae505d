"""When which engine served which request: `timeline.jsonl` of a run whose engines work side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


def overlaps(intervals: list[Interval]) -> int:
    """Scores that were under way while an episode other than their own was being written."""
    written = [i for i in intervals if i.kind == "generate"]
    return sum(
        any(w.start < s.end and s.start < w.end and w.episode != s.episode for w in written)
        for s in intervals
        if s.kind == "score"
    )
