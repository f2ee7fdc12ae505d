"""The load balancer: which replica takes the next request.

A request goes to the replica that served its key before, so that prefixes it computed are reused, and otherwise to the
replica with the fewest requests in flight. Each replica holds at most `limit` requests; when all are full, callers wait
in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Hashable
from typing import NamedTuple, Protocol

REMEMBERED_KEYS = 4096
"""Keys whose replica is remembered."""


class LoadBalancer(Protocol):
    """Assigns a replica, by its number, to each request."""

    async def acquire(self, key: Hashable, exclude: Collection[int]) -> int:
        """Return a replica that is not excluded and count the request as in flight there; wait until one has room."""

    def release(self, key: Hashable, replica: int, answered: bool) -> None:
        """Count the request as finished. If the replica answered, later requests with this key prefer it."""


class _Waiter(NamedTuple):
    key: Hashable
    exclude: Collection[int]
    replica: asyncio.Future[int]


class LocalLoadBalancer:
    """A load balancer for the requests of this process."""

    def __init__(self, replicas: int, limit: int | None = None) -> None:
        """`limit` is the number of requests that a replica may have in flight; None means unbounded."""
        self.limit = limit
        self.in_flight = [0] * replicas
        self._preferred: dict[Hashable, int] = {}
        """the replica that serves each key; the oldest keys are forgotten"""
        self._waiters: deque[_Waiter] = deque()

    async def acquire(self, key: Hashable, exclude: Collection[int]) -> int:
        if (replica := self.try_acquire(key, exclude)) is not None:
            return replica
        waiting = self.enqueue(key, exclude)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.release(key, waiting.result(), answered=False)
            raise

    def release(self, key: Hashable, replica: int, answered: bool) -> None:
        self.in_flight[replica] -= 1
        if answered:
            self._remember(key, replica)
        if self._waiters:
            self._serve_waiters(replica)

    def try_acquire(self, key: Hashable, exclude: Collection[int]) -> int | None:
        """Like `acquire`, but return None instead of waiting when no replica has room."""
        preferred = self._preferred.get(key)
        if preferred is not None and preferred not in exclude and self._has_room(preferred):
            replica = preferred
        else:
            free = [number for number in range(len(self.in_flight)) if number not in exclude and self._has_room(number)]
            if not free:
                return None
            replica = min(free, key=self.in_flight.__getitem__)
            if preferred is None:
                self._remember(key, replica)
        self.in_flight[replica] += 1
        return replica

    def enqueue(self, key: Hashable, exclude: Collection[int]) -> asyncio.Future[int]:
        """Queue a request and return a future of its replica. The queue is first in, first out; a request takes the
        first replica that has room and is not excluded."""
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(key, exclude, waiting))
        return waiting

    def _serve_waiters(self, replica: int) -> None:
        """Assign a replica that has room to the first waiters that do not exclude it."""
        skipped: list[_Waiter] = []
        while self._waiters and self._has_room(replica):
            first = self._waiters.popleft()
            if first.replica.done():
                continue
            if replica in first.exclude:
                skipped.append(first)
                continue
            self.in_flight[replica] += 1
            first.replica.set_result(replica)
        self._waiters.extendleft(reversed(skipped))

    def _has_room(self, replica: int) -> bool:
        return self.limit is None or self.in_flight[replica] < self.limit

    def _remember(self, key: Hashable, replica: int) -> None:
        self._preferred.pop(key, None)
        self._preferred[key] = replica
        if len(self._preferred) > REMEMBERED_KEYS:
            del self._preferred[next(iter(self._preferred))]
