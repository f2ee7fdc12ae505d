"""Who keeps the ledger of a queue whose tensors are elsewhere: many processes ask, one clerk answers.

A process asks before it writes (`begin`) and tells when the data is stored (`settle`). In between it holds a lease on
the rows: nobody else writes the same columns or clears them. The process that caused rows to be dropped gets a lease
to clear them. A lease that is not settled in time ends by itself, is counted, and what it covered is left to the next
process that calls to clear, unless the ledger has the row.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from understudy.data.trajectory import GroupKey, Key
from understudy.queue.contract import BatchRef, QueueTimeout, Tags
from understudy.queue.groups import Group
from understudy.queue.ledger import Ledger

LEASE = 60.0
"""Seconds within which a write or a clear must be over."""


class Request(NamedTuple):
    """One call of a writer, without data."""

    what: Literal["open", "put", "update", "seal", "fail", "restore"]
    at: Any
    """group, episode or key"""
    value: Any
    """samples, count or reason; what `describe` says about columns; books and descriptions of a snapshot"""
    tags: Mapping[Key, Tags] = {}  # never changed
    """of the rows that it puts"""


class Answer(NamedTuple):
    """What became of a request, or what is to be done for it."""

    value: Any = None
    error: Exception | None = None
    write: tuple[str, ...] | None = None
    """the columns to store before it can be entered; none named means all of them"""
    busy: Key | None = None
    """a row that another writer holds: ask again when it is free"""


_DONE, _WRITE = Answer(), Answer(write=())
"""The usual answers; the same object many times is a short message."""


class Reply(NamedTuple):
    """The clerk's answer to one call."""

    lease: int
    """to be settled; 0 if there is nothing to settle"""
    answers: list[Answer]
    clear: list[Key]
    """rows to be cleared from storage before settling"""
    counts: dict[str, int]


@dataclass(slots=True)
class _Lease:
    timer: asyncio.TimerHandle
    writes: dict[Key, set[str] | None] = field(default_factory=dict)
    """columns of the row that are being written; None is the whole row"""
    clears: list[Key] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """to be entered when their data is stored"""
    handed: Mapping[GroupKey, Group] = field(default_factory=dict)
    """what a taker got that has not settled yet"""


class Clerk:
    """Every method is a call from some process. Errors are answers: raised, they would arrive wrapped."""

    def __init__(self, lease: float = LEASE) -> None:
        self._seconds = lease
        self._ledger = Ledger()
        self._ledger.counts["expired_leases"] = 0
        self._leases: dict[int, _Lease] = {}
        self._last = 0
        self._held: dict[Key, int] = {}
        self._freed: dict[Key, asyncio.Event] = {}
        self._garbage: dict[Key, None] = {}
        """rows to be cleared by whoever calls next"""

    async def begin(self, pickled: bytes) -> Reply:
        """A list of requests: enter what needs no data; lease the rows of what does."""
        requests: list[Request] = pickle.loads(pickled)
        number = self._lease()
        return self._reply(number, [self._begin(number, request) for request in requests])

    async def settle(self, number: int, stored: bool) -> Reply:
        """The data of a lease is stored, or could not be; its rows to be cleared are cleared. No answers at all mean
        that nothing was entered."""
        answers: list[Answer] = []
        if number in self._leases:
            answers = [self._enter(request) for request in self._leases[number].requests if stored]
            self._end(number)
        return self._reply(self._lease(), answers)

    async def free(self, key: Key) -> None:
        """Wait until nobody holds the row."""
        while key in self._held:
            await self._freed.setdefault(key, asyncio.Event()).wait()

    async def ready(
        self, partition: str, needs: Sequence[str], groups: int, left: float | None, deadline: float | None
    ) -> Exception | None:
        """Wait for groups that can be taken; `left` of the taker's deadline remain."""
        try:
            await self._ledger.ready(partition, needs, groups, left, deadline)
        except (QueueTimeout, ValueError) as error:
            return error
        return None

    async def hand_out(
        self, partition: str, needs: Sequence[str], groups: int, oldest: int | None
    ) -> tuple[BatchRef, Reply] | None:
        taken = self._ledger.hand_out(partition, needs, groups, oldest)
        if taken is None:
            return None
        number = self._lease()
        self._leases[number].handed = taken[1]
        return taken[0], self._reply(number, [])

    async def give_back(self, number: int) -> None:
        """The taker has gone before it could use what it got."""
        self._ledger.give_back(self._leases[number].handed)
        self._end(number)

    async def ask(self, question: Literal["columns"], *args: Any) -> Answer:
        try:
            return Answer(getattr(self._ledger, question)(*args))
        except (KeyError, ValueError) as error:
            return Answer(error=error)

    async def clear(self, keys: Iterable[Key]) -> Reply:
        self._ledger.clear(keys)
        return self._reply(self._lease(), [])

    async def snapshot(self) -> tuple[dict[str, Any], dict[Key, tuple[str, ...]]]:
        """The books, and the columns of each row that belongs to them."""
        return self._ledger.snapshot(), {key: tuple(row.columns) for key, row in self._ledger.rows().items()}

    def _begin(self, number: int, request: Request) -> Answer:
        try:
            match request.what:
                case "put":
                    return self._begin_put(number, request)
                case "update":
                    return self._begin_update(number, request)
                case "restore":
                    return self._begin_restore(number, request)
                case _:
                    return self._enter(request)
        except (KeyError, ValueError) as error:
            return Answer(error=error)

    def _begin_put(self, number: int, request: Request) -> Answer:
        if request.at in self._held:
            return Answer(busy=request.at)
        if self._ledger.admit_row(request.at, request.value) is None:
            return self._enter(request)
        self._hold(number, request.at, None)
        self._leases[number].requests.append(request)
        return _WRITE

    def _begin_update(self, number: int, request: Request) -> Answer:
        """Several updates of one batch may go to the same row, if their columns differ."""
        lease, key = self._leases[number], request.at
        mine = lease.writes.get(key)
        if key in self._held and mine is None:
            return Answer(busy=key)
        new = self._ledger.admit_columns(key, request.value)
        if not new:
            return self._enter(request)
        if mine is not None and not mine.isdisjoint(new):
            return Answer(busy=key)
        self._hold(number, key, {*new, *(mine or ())})
        lease.requests.append(request)
        return Answer(write=tuple(new))

    def _begin_restore(self, number: int, request: Request) -> Answer:
        """Tried on an empty ledger first: what does not fit is not stored."""
        books, described = request.value
        self._ledger.check_empty()
        Ledger().restore(books, described)
        if taken := next((key for key in described if key in self._held), None):
            return Answer(busy=taken)
        for key in described:
            self._hold(number, key, None)
        self._leases[number].requests.append(request)
        return _WRITE

    def _enter(self, request: Request) -> Answer:
        what, at, value, tags = request
        try:
            match what:
                case "put":
                    self._ledger.put(at, value, tags.get(at))
                case "update":
                    return Answer(self._ledger.update(at, value))
                case "restore":
                    self._ledger.restore(*value)
                case "open":
                    self._ledger.open(at, value)
                case "seal":
                    self._ledger.seal(at, value)
                case "fail":
                    self._ledger.fail(at, value)
        except (KeyError, ValueError) as error:
            return Answer(error=error)
        return _DONE

    def _lease(self) -> int:
        self._last += 1
        timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, self._last)
        self._leases[self._last] = _Lease(timer)
        return self._last

    def _hold(self, number: int, key: Key, columns: set[str] | None) -> None:
        self._held[key] = number
        self._leases[number].writes[key] = columns

    def _reply(self, number: int, answers: list[Answer]) -> Reply:
        """Rows that were dropped and that nobody holds are the caller's to clear; a holder learns when it settles."""
        lease = self._leases[number]
        self._garbage |= dict.fromkeys(self._ledger.drain())
        lease.clears = [key for key in self._garbage if key not in self._held]
        self._garbage.clear()
        self._held.update(dict.fromkeys(lease.clears, number))
        counts = dict(self._ledger.counts)
        if lease.requests or lease.clears or lease.handed:
            return Reply(number, answers, lease.clears, counts)
        self._end(number)
        return Reply(0, answers, [], counts)

    def _end(self, number: int) -> None:
        """Let go of the rows. What was stored and is not in the ledger is garbage."""
        lease = self._leases.pop(number)
        lease.timer.cancel()
        for key in (*lease.writes, *lease.clears):
            del self._held[key]
            if key in self._freed:
                self._freed.pop(key).set()
        self._garbage |= {key: None for key in lease.writes if key not in self._ledger}

    def _expire(self, number: int) -> None:
        lease = self._leases[number]
        self._end(number)
        self._ledger.counts["expired_leases"] += bool(lease.writes or lease.clears)
        self._garbage |= {key: None for key in lease.clears if key not in self._ledger}
