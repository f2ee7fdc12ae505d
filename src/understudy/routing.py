"""One load balancer for student and teacher replicas: fewest requests in flight, sticky by key, retry elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from understudy.errors import CannotJudge

Replica = TypeVar("Replica")
Answer = TypeVar("Answer")

REMEMBERED = 4096
"""Keys whose replica is remembered."""


class AllReplicasFailed(CannotJudge):
    """No replica could answer; the message has each one's reason."""


class Router(Generic[Replica]):
    """Chooses a replica for every call."""

    def __init__(self, name: str, replicas: Sequence[Replica]) -> None:
        self.name = name
        self.replicas = list(replicas)
        self.in_flight = [0] * len(replicas)
        self.retries = 0
        """calls that were made again on another replica"""
        self._home: dict[Hashable, int] = {}
        """the replica that serves each key; the oldest are forgotten"""

    async def call(self, sticky: Hashable, ask: Callable[[Replica], Awaitable[Answer]]) -> Answer:
        """Ask the replica that served `sticky` before, else the least busy one; on failure the others, each once."""
        reasons: list[str] = []
        order = self._order(sticky)
        for attempt, number in enumerate(order):
            self.retries += attempt > 0
            self.in_flight[number] += 1
            try:
                answer = await ask(self.replicas[number])
            except Exception as error:
                reasons.append(f"replica {number}: {type(error).__name__}: {error}")
                continue
            finally:
                self.in_flight[number] -= 1
            self._remember(sticky, number)
            return answer
        raise AllReplicasFailed(f"{self.name}: no replica could answer ({'; '.join(reasons)})")

    def _order(self, sticky: Hashable) -> list[int]:
        by_load = sorted(range(len(self.replicas)), key=lambda number: (self.in_flight[number], number))
        home = self._home.get(sticky)
        if home is None:
            self._remember(sticky, by_load[0])
            return by_load
        return [home, *(number for number in by_load if number != home)]

    def _remember(self, sticky: Hashable, number: int) -> None:
        self._home.pop(sticky, None)
        self._home[sticky] = number
        if len(self._home) > REMEMBERED:
            del self._home[next(iter(self._home))]
