"""What processes that are started again need to know, and what the run wants to know of them.

The board's process is small and starts fast: it hands on what others can read, without reading it itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from understudy.runtime.ray import Stored

BOARD = "board"
"""Name under which processes find it."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process of an engine began: once, unless it died."""

    name: str
    actor: str
    pid: int
    at: float


class Board:
    """One in every run on a cluster."""

    def __init__(self) -> None:
        self._company: Stored | None = None
        self._weights: tuple[int, list[Stored]] | None = None
        self._starts: list[Started] = []

    async def introduce(self, company: Stored) -> None:
        """The queue and the engines, before anybody asks."""
        self._company = company

    async def company(self) -> Stored | None:
        return self._company

    async def publish(self, version: int, buckets: list[Stored]) -> None:
        self._weights = (version, buckets)

    async def weights(self) -> tuple[int, list[Stored]] | None:
        """The newest version that was published, for an engine that missed it."""
        return self._weights

    async def started(self, start: Started) -> None:
        self._starts.append(start)

    async def starts(self) -> list[Started]:
        return self._starts
