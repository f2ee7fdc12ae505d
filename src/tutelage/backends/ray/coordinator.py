"""What processes that are started again need to know, and what the run wants to know of them.

It is also where routers ask which replica takes a request (`routing.shared`). The coordinator's process is small and
starts fast: it hands on what others can read, without reading it itself.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from tutelage.backends.ray.cluster import Remote, Stored
from tutelage.errors import ReplicaGone, UserError
from tutelage.routing.shared import Call, Desks, Grant, Said, SharedDesks

COORDINATOR = "coordinator"
"""Name under which processes find it."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process of an engine began: once, unless it died."""

    name: str
    actor: str
    pid: int
    at: float


class Coordinator:
    """One in every run on a cluster."""

    def __init__(self, replicas: dict[str, int], limit: int) -> None:
        """Replicas by the name of their desk; requests that each of them has at most."""
        self._desks = Desks(replicas, limit)
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

    async def enter(self, who: str) -> None:
        self._desks.enter(who)

    async def leave(self, who: str) -> None:
        self._desks.leave(who)

    async def exchange(self, who: str, pickled: bytes) -> list[Grant]:
        said: Said = pickle.loads(pickled)
        return self._desks.exchange(who, said)

    async def granted(self, who: str) -> list[Grant]:
        return await self._desks.granted(who)

    async def in_flight(self) -> dict[str, list[int]]:
        """Requests of every replica, by desk."""
        return {name: list(desk.in_flight) for name, desk in self._desks.desks.items()}


async def ask_coordinator(coordinator: Remote, method: str, *args: Any) -> Any:
    """Its answer; a run without a coordinator ends."""
    try:
        return await coordinator.call(method, *args)
    except ReplicaGone as error:
        raise UserError(
            f"the run lost its coordinator; `tutelage resume` goes on from the last checkpoint: {error}"
        ) from error


def desks(coordinator: Remote, who: str) -> SharedDesks:
    """The desks, for a process that begins. Messages are pickled here: Ray would look at each of their words."""
    coordinator.ask("enter", who)
    return SharedDesks(
        who,
        Call(
            exchange=lambda who, said: ask_coordinator(coordinator, "exchange", who, pickle.dumps(said)),
            granted=lambda who: ask_coordinator(coordinator, "granted", who),
        ),
    )
