"""The router: calls a replica and retries on the others.

call ──► load balancer: the replica that served the key before, else the least busy one
           │ all full: wait until one has room (back pressure)
           ├─ answered
           ├─ failed: try each of the others once
           └─ gone: try the others; when all are gone, retry those that may come back, until the deadline

A router makes the calls of its own process. Several routers can share one load balancer, also across processes
(`routing.shared`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from tutelage.errors import CannotJudge, ReplicaGone
from tutelage.routing.load_balancer import LoadBalancer, LocalLoadBalancer

Replica = TypeVar("Replica")
Result = TypeVar("Result")

PAUSE = 0.2
"""Seconds before replicas that are gone are tried again, unless one says how long it will take."""


class AllReplicasFailed(CannotJudge):
    """No replica could answer; the message has the reason of each."""


class Router(Generic[Replica]):
    """Chooses a replica for every call."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        balancer: LoadBalancer | None = None,
        deadline: float | None = None,
    ) -> None:
        """Without a `balancer`, the router has one of its own. `deadline` is the number of seconds for a call, retries
        included; without a deadline, the router does not wait for replicas that are being restarted."""
        self.name = name
        self.replicas = list(replicas)
        self.balancer = balancer or LocalLoadBalancer(len(replicas))
        self.deadline = deadline
        self.retries = 0
        """calls that were repeated, on another replica or on one that came back"""

    async def call(self, key: Hashable, ask: Callable[[Replica], Awaitable[Result]]) -> Result:
        """Call the replica that served `key` before, else the least busy one; if it fails, call the others."""
        reasons: dict[int, str] = {}
        if self.deadline is None:
            return await self._call(key, ask, reasons)
        try:
            async with asyncio.timeout(self.deadline):
                return await self._call(key, ask, reasons)
        except TimeoutError:
            raise AllReplicasFailed(
                f"{self.name}: no answer within {self.deadline:g} s ({_joined(reasons) or 'all replicas are busy'})"
            ) from None

    async def _call(
        self, key: Hashable, ask: Callable[[Replica], Awaitable[Result]], reasons: dict[int, str]
    ) -> Result:
        failed: set[int] = set()
        gone: dict[int, float] = {}
        while True:
            number = await self.balancer.acquire(key, (*failed, *gone))
            self.retries += bool(reasons)
            answered = False
            try:
                answer = await ask(self.replicas[number])
                answered = True
                return answer
            except Exception as error:
                reasons[number] = f"replica {number}: {type(error).__name__}: {error}"
                if isinstance(error, ReplicaGone) and not error.for_good and self.deadline is not None:
                    gone[number] = PAUSE if error.after is None else error.after
                else:
                    failed.add(number)
            finally:
                self.balancer.release(key, number, answered)
            if len(failed) == len(self.replicas):
                raise AllReplicasFailed(f"{self.name}: no replica could answer ({_joined(reasons)})")
            if len(failed) + len(gone) == len(self.replicas):
                await asyncio.sleep(min(gone.values()))
                gone.clear()


def _joined(reasons: dict[int, str]) -> str:
    return "; ".join(reasons[number] for number in sorted(reasons))
