"""Load balancers that all processes of a run share: loads, preferred replicas and limits are those of the whole run.

client (each process) ──Acquire, Release──► server (coordinator): a LocalLoadBalancer for the student, each teacher and
client (each process) ◄──Lease───────────      the reference; leases come at once, or when a replica has room

A client sends one message at a time. Requests that its routers make meanwhile are collected into the next message, so
the cost per request falls as the number of requests grows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from tutelage.routing.load_balancer import LocalLoadBalancer

STUDENT, REFERENCE = "student", "reference"
"""Names of load balancers."""


def teacher_balancer(teacher: str) -> str:
    """Return the name of a teacher's load balancer."""
    return f"teacher {teacher!r}"


class Acquire(NamedTuple):
    """A request needs a replica."""

    ticket: int
    balancer: str
    key: Hashable
    """of plain types only: the coordinator imports no others"""
    exclude: tuple[int, ...]


class Release(NamedTuple):
    """A request has finished."""

    balancer: str
    key: Hashable
    replica: int
    answered: bool


Messages = Sequence[Acquire | Release]
Lease = tuple[int, int]
"""A ticket and the replica that it was given. A plain tuple, because Ray pickles named ones slowly."""


class _Client:
    """A connected process, as the server sees it."""

    def __init__(self) -> None:
        self.held: Counter[tuple[str, int]] = Counter()
        """leases by load balancer and replica"""
        self.waiting: set[asyncio.Future[int]] = set()
        self.leases: list[Lease] = []
        """of requests that had to wait, not yet fetched"""
        self.changed = asyncio.Event()
        self.disconnected = False


class LoadBalancerServer:
    """The load balancers of a run, for all of its processes."""

    def __init__(self, replicas: Mapping[str, int], limit: int | None) -> None:
        self.balancers = {name: LocalLoadBalancer(number, limit) for name, number in replicas.items()}
        self._clients: dict[str, _Client] = {}

    def connect(self, name: str) -> None:
        """Add a process. If it replaces one that died, the leases of that one are released."""
        self.disconnect(name)
        self._clients[name] = _Client()

    def disconnect(self, name: str) -> None:
        """Remove a process and release its leases. Safe to repeat."""
        if (client := self._clients.pop(name, None)) is None:
            return
        client.disconnected = True
        client.changed.set()
        for waiting in client.waiting:
            waiting.cancel()
        for balancer, replica in client.held.elements():
            self.balancers[balancer].release(None, replica, answered=False)

    def exchange(self, name: str, messages: Messages) -> list[Lease]:
        """Handle the messages of a process. Return the leases that can be given at once; queue the other requests."""
        client = self._clients[name]
        leases: list[Lease] = []
        for message in messages:
            balancer = self.balancers[message.balancer]
            if isinstance(message, Release):
                client.held[message.balancer, message.replica] -= 1
                balancer.release(message.key, message.replica, message.answered)
            elif (replica := balancer.try_acquire(message.key, message.exclude)) is not None:
                client.held[message.balancer, replica] += 1
                leases.append((message.ticket, replica))
            else:
                self._enqueue(client, balancer, message)
        return leases

    def _enqueue(self, client: _Client, balancer: LocalLoadBalancer, request: Acquire) -> None:
        def grant(waiting: asyncio.Future[int]) -> None:
            client.waiting.discard(waiting)
            if waiting.cancelled():
                return
            replica = waiting.result()
            if client.disconnected:
                balancer.release(None, replica, answered=False)
                return
            client.held[request.balancer, replica] += 1
            client.leases.append((request.ticket, replica))
            client.changed.set()

        waiting = balancer.enqueue(request.key, request.exclude)
        client.waiting.add(waiting)
        waiting.add_done_callback(grant)

    async def wait_for_leases(self, name: str) -> list[Lease]:
        """Wait until queued requests of a process have replicas, and return their leases."""
        client = self._clients[name]
        await client.changed.wait()
        client.changed.clear()
        leases, client.leases = client.leases, []
        return leases


class Transport(NamedTuple):
    """How a client reaches the server."""

    exchange: Callable[[str, Messages], Awaitable[list[Lease]]]
    wait_for_leases: Callable[[str], Awaitable[list[Lease]]]


class LoadBalancerClient:
    """The shared load balancers, as one process sees them. `client[name]` is one of them."""

    def __init__(self, name: str, transport: Transport) -> None:
        """`name` identifies this process to the server."""
        self._name, self._transport = name, transport
        self._tickets = count()
        self._open: dict[int, tuple[str, asyncio.Future[int]]] = {}
        """requests without a lease, cancelled ones included: their leases are released on arrival"""
        self._queued: set[int] = set()
        """tickets that the server queued"""
        self._outbox: list[Acquire | Release] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __getitem__(self, balancer: str) -> SharedLoadBalancer:
        return SharedLoadBalancer(self, balancer)

    async def acquire(self, balancer: str, key: Hashable, exclude: Collection[int]) -> int:
        ticket = next(self._tickets)
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[ticket] = (balancer, waiting)
        self._post(Acquire(ticket, balancer, key, tuple(exclude)))
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._post(Release(balancer, None, waiting.result(), answered=False))
            raise

    def release(self, balancer: str, key: Hashable, replica: int, answered: bool) -> None:
        self._post(Release(balancer, key, replica, answered))

    def _post(self, message: Acquire | Release) -> None:
        self._outbox.append(message)
        self._ensure("send", self._send)

    def _ensure(self, task: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task unless one of that name is running."""
        if task not in self._tasks:
            self._tasks[task] = asyncio.create_task(self._run(task, work))

    async def _run(self, task: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._fail(error)
        finally:
            del self._tasks[task]

    async def _send(self) -> None:
        while self._outbox:
            messages, self._outbox = self._outbox, []
            self._deliver(await self._transport.exchange(self._name, messages))
            self._queued.update(m.ticket for m in messages if isinstance(m, Acquire) and m.ticket in self._open)
            if self._queued:
                self._ensure("receive", self._receive)

    async def _receive(self) -> None:
        while self._queued:
            self._deliver(await self._transport.wait_for_leases(self._name))

    def _deliver(self, leases: list[Lease]) -> None:
        for ticket, replica in leases:
            balancer, waiting = self._open.pop(ticket)
            self._queued.discard(ticket)
            if waiting.done():
                self._post(Release(balancer, None, replica, answered=False))
            else:
                waiting.set_result(replica)

    def _fail(self, error: Exception) -> None:
        """Raise the error in every request that waits."""
        requests, self._open = self._open, {}
        self._queued.clear()
        for _, waiting in requests.values():
            if not waiting.done():
                waiting.set_exception(error)


class SharedLoadBalancer:
    """The LoadBalancer that a router uses: one of the shared ones, through this process's client."""

    def __init__(self, client: LoadBalancerClient, name: str) -> None:
        self._client, self._name = client, name

    async def acquire(self, key: Hashable, exclude: Collection[int]) -> int:
        return await self._client.acquire(self._name, key, exclude)

    def release(self, key: Hashable, replica: int, answered: bool) -> None:
        self._client.release(self._name, key, replica, answered)
