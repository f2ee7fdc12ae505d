"""One load balancer for student and teacher replicas: fewest requests in flight, sticky by key, retry elsewhere.

call ──► desk: the replica that served the key before, else the least busy one
           │ full: wait until one has room (back pressure)
           ├─ answered
           ├─ failed: the others, each once
           └─ gone: the others; when all are gone, again as long as one may come back, until the deadline

A router makes the calls of its process. Who takes the next one is decided at the desk, which several routers can share:
then all of them together are one load balancer (`desks`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from tutelage.errors import CannotJudge, ReplicaGone

Replica = TypeVar("Replica")
Answer = TypeVar("Answer")

REMEMBERED = 4096
"""Keys whose replica is remembered."""
PAUSE = 0.2
"""Seconds before replicas that are being started again are asked again."""


class AllReplicasFailed(CannotJudge):
    """No replica could answer; the message has each one's reason."""


class Desk(Protocol):
    """Gives each request a replica, by number."""

    async def take(self, sticky: Hashable, without: Collection[int]) -> int:
        """One with room, its place taken; waits for one."""

    def give(self, sticky: Hashable, number: int, answered: bool) -> None:
        """The place is free again. A key stays with the replica that answered."""


class _Waiting(NamedTuple):
    sticky: Hashable
    without: Collection[int]
    place: asyncio.Future[int]


class LocalDesk:
    """A desk in this process."""

    def __init__(self, replicas: int, limit: int | None = None) -> None:
        """`limit`: requests that a replica has at most."""
        self.limit = limit
        self.in_flight = [0] * replicas
        self._home: dict[Hashable, int] = {}
        """the replica that serves each key; the oldest are forgotten"""
        self._waiting: deque[_Waiting] = deque()

    async def take(self, sticky: Hashable, without: Collection[int]) -> int:
        if (number := self.seat(sticky, without)) is not None:
            return number
        place = self.line_up(sticky, without)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give(sticky, place.result(), answered=False)
            raise

    def give(self, sticky: Hashable, number: int, answered: bool) -> None:
        self.in_flight[number] -= 1
        if answered:
            self._remember(sticky, number)
        if self._waiting:
            self._next(number)

    def seat(self, sticky: Hashable, without: Collection[int]) -> int | None:
        """A replica if one has room now."""
        home = self._home.get(sticky)
        if home is not None and home not in without and self._has_room(home):
            number = home
        else:
            free = [number for number in range(len(self.in_flight)) if number not in without and self._has_room(number)]
            if not free:
                return None
            number = min(free, key=self.in_flight.__getitem__)
            if home is None:
                self._remember(sticky, number)
        self.in_flight[number] += 1
        return number

    def line_up(self, sticky: Hashable, without: Collection[int]) -> asyncio.Future[int]:
        """A place in the queue: first come, first served, by whichever replica has room first."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(sticky, without, place))
        return place

    def _next(self, number: int) -> None:
        """Somebody left a replica: the first who waits and would go there."""
        passed: list[_Waiting] = []
        while self._waiting and self._has_room(number):
            first = self._waiting.popleft()
            if first.place.done():
                continue
            if number in first.without:
                passed.append(first)
                continue
            self.in_flight[number] += 1
            first.place.set_result(number)
        self._waiting.extendleft(reversed(passed))

    def _has_room(self, number: int) -> bool:
        return self.limit is None or self.in_flight[number] < self.limit

    def _remember(self, sticky: Hashable, number: int) -> None:
        self._home.pop(sticky, None)
        self._home[sticky] = number
        if len(self._home) > REMEMBERED:
            del self._home[next(iter(self._home))]


class Router(Generic[Replica]):
    """Chooses a replica for every call."""

    def __init__(
        self, name: str, replicas: Sequence[Replica], desk: Desk | None = None, deadline: float | None = None
    ) -> None:
        """`desk`: one for these replicas alone, unless given; `deadline`: seconds for a call, all tries included.
        Without a deadline, replicas that are gone are not waited for."""
        self.name = name
        self.replicas = list(replicas)
        self.desk = desk or LocalDesk(len(replicas))
        self.deadline = deadline
        self.retries = 0
        """calls that were made again, on another replica or on one that came back"""

    async def call(self, sticky: Hashable, ask: Callable[[Replica], Awaitable[Answer]]) -> Answer:
        """Ask the replica that served `sticky` before, else the least busy one; on failure the others."""
        reasons: dict[int, str] = {}
        if self.deadline is None:
            return await self._call(sticky, ask, reasons)
        try:
            async with asyncio.timeout(self.deadline):
                return await self._call(sticky, ask, reasons)
        except TimeoutError:
            raise AllReplicasFailed(
                f"{self.name}: no answer within {self.deadline:g} s ({_joined(reasons) or 'all replicas are busy'})"
            ) from None

    async def _call(
        self, sticky: Hashable, ask: Callable[[Replica], Awaitable[Answer]], reasons: dict[int, str]
    ) -> Answer:
        failed: set[int] = set()
        gone: set[int] = set()
        while True:
            number = await self.desk.take(sticky, (*failed, *gone))
            self.retries += bool(reasons)
            answered = False
            try:
                answer = await ask(self.replicas[number])
                answered = True
                return answer
            except Exception as error:
                reasons[number] = f"replica {number}: {type(error).__name__}: {error}"
                back = isinstance(error, ReplicaGone) and not error.for_good and self.deadline is not None
                (gone if back else failed).add(number)
            finally:
                self.desk.give(sticky, number, answered)
            if len(failed) == len(self.replicas):
                raise AllReplicasFailed(f"{self.name}: no replica could answer ({_joined(reasons)})")
            if len(failed) + len(gone) == len(self.replicas):
                gone.clear()
                await asyncio.sleep(PAUSE)


def _joined(reasons: dict[int, str]) -> str:
    return "; ".join(reasons[number] for number in sorted(reasons))
