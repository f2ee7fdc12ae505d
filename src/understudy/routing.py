"""One load balancer for student and teacher replicas: fewest requests in flight, sticky by key, retry elsewhere.

call ──► the replica that served the key before, else the least busy one
           │ full: wait until one has room (back pressure)
           ├─ answered
           ├─ failed: the others, each once
           └─ gone: the others; when all are gone, again as long as one may come back, until the deadline
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from understudy.errors import CannotJudge
from understudy.runtime.contract import ReplicaGone

Replica = TypeVar("Replica")
Answer = TypeVar("Answer")

REMEMBERED = 4096
"""Keys whose replica is remembered."""
PAUSE = 0.2
"""Seconds before replicas that are being started again are asked again."""


class AllReplicasFailed(CannotJudge):
    """No replica could answer; the message has each one's reason."""


class Router(Generic[Replica]):
    """Chooses a replica for every call."""

    def __init__(
        self, name: str, replicas: Sequence[Replica], *, limit: int | None = None, deadline: float | None = None
    ) -> None:
        """`limit`: requests that a replica has at most; `deadline`: seconds for a call, all tries included. Without a
        deadline, replicas that are gone are not waited for."""
        self.name = name
        self.replicas = list(replicas)
        self.limit, self.deadline = limit, deadline
        self.in_flight = [0] * len(replicas)
        self.retries = 0
        """calls that were made again, on another replica or on one that came back"""
        self._home: dict[Hashable, int] = {}
        """the replica that serves each key; the oldest are forgotten"""
        self._room = asyncio.Condition()

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
            number = await self._admit(sticky, failed | gone)
            self.retries += bool(reasons)
            try:
                answer = await ask(self.replicas[number])
            except Exception as error:
                reasons[number] = f"replica {number}: {type(error).__name__}: {error}"
                back = isinstance(error, ReplicaGone) and not error.for_good and self.deadline is not None
                (gone if back else failed).add(number)
            else:
                self._remember(sticky, number)
                return answer
            finally:
                self.in_flight[number] -= 1
                if self.limit is not None:
                    await self._wake()
            if len(failed) == len(self.replicas):
                raise AllReplicasFailed(f"{self.name}: no replica could answer ({_joined(reasons)})")
            if len(failed) + len(gone) == len(self.replicas):
                gone.clear()
                await asyncio.sleep(PAUSE)

    async def _admit(self, sticky: Hashable, without: set[int]) -> int:
        """A replica with room, its place taken; waits for one."""
        while (number := self._choose(sticky, without)) is None:
            async with self._room:
                await self._room.wait()
        self.in_flight[number] += 1
        return number

    def _choose(self, sticky: Hashable, without: set[int]) -> int | None:
        home = self._home.get(sticky)
        if home is not None and home not in without and self._has_room(home):
            return home
        free = [number for number in range(len(self.replicas)) if number not in without and self._has_room(number)]
        if not free:
            return None
        number = min(free, key=self.in_flight.__getitem__)
        if home is None:
            self._remember(sticky, number)
        return number

    def _has_room(self, number: int) -> bool:
        return self.limit is None or self.in_flight[number] < self.limit

    async def _wake(self) -> None:
        async with self._room:
            self._room.notify_all()

    def _remember(self, sticky: Hashable, number: int) -> None:
        self._home.pop(sticky, None)
        self._home[sticky] = number
        if len(self._home) > REMEMBERED:
            del self._home[next(iter(self._home))]


def _joined(reasons: dict[int, str]) -> str:
    return "; ".join(reasons[number] for number in sorted(reasons))
