"""Who keeps the ledger of a queue whose tensors are elsewhere: many processes ask, one clerk answers.

A process asks before it writes (`begin`) and tells when the data is stored (`settle`). In between it holds a lease on
the rows, which it renews until it is done: nobody else writes the same columns or clears them. The process that caused
rows to be dropped gets a lease to clear them.

A lease that is not renewed in time is lost: its process has died, or is stopped and may go on at any moment; one whose
write failed is lost too, for parts of it may still be under way. What it holds in storage then belongs to it for ever:
nobody else reads, writes or clears that place, unless its process reports after all. The rows are free again, and
whoever writes them gets a place of its own. So data that comes late can harm nothing, not even through a slot that
storage gave to another row meanwhile. Lost leases and the rows they held are counted.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tutelage.data.trajectory import GroupKey, Key
from tutelage.queue.contract import BatchRef, QueueTimeout, Tags
from tutelage.queue.groups import Group
from tutelage.queue.ledger import Ledger

LEASE = 60.0
"""Seconds after which a lease that was not renewed is lost."""

StoragePlace = tuple[Key, int]
"""Where storage has a row, or some columns of it: 0, or the number of the lease that wrote them because place 0 is
lost."""


class Request(NamedTuple):
    """One call of a writer, without data."""

    what: Literal["open", "put", "update", "seal", "fail", "restore"]
    at: Any
    """group, episode or key"""
    value: Any
    """samples, count or reason; what `describe` says about columns; books and descriptions of a snapshot"""
    tags: Mapping[Key, Tags] = {}  # never changed
    """of the rows that it puts"""
    of: int | None = None
    """trajectories of the episode that a put seals"""


class ClerkAnswer(NamedTuple):
    """What became of a request, or what is to be done for it."""

    value: Any = None
    error: Exception | None = None
    write: tuple[str, ...] | None = None
    """the columns to store before it can be entered; none named means all of them"""
    place: int = 0
    """where to store them"""
    busy: Key | None = None
    """a row that another writer holds: ask again when it is free"""


_DONE, _WRITE = ClerkAnswer(), ClerkAnswer(write=())
"""The usual answers; the same object many times is a short message."""


class Reply(NamedTuple):
    """The clerk's answer to one call."""

    lease: int
    """to be settled; 0 if there is nothing to settle"""
    answers: list[ClerkAnswer]
    clear: list[StoragePlace]
    """to be cleared from storage before settling"""
    counts: dict[str, int]
    seconds: float
    """within which the lease must be renewed"""


@dataclass(slots=True)
class _Lease:
    timer: asyncio.TimerHandle
    writes: dict[Key, set[str] | None] = field(default_factory=dict)
    """columns of the row that are being written; None is the whole row"""
    clears: list[StoragePlace] = field(default_factory=list)
    requests: list[tuple[Request, int]] = field(default_factory=list)
    """to be entered when their data is stored, and where that is"""
    places: dict[Key, int] = field(default_factory=dict)
    """where the rows are being written"""
    handed: Mapping[GroupKey, Group] = field(default_factory=dict)
    """what a taker got that has not settled yet"""


class Clerk:
    """Every method is a call from some process. Errors are answers: raised, they would arrive wrapped."""

    def __init__(self, lease: float = LEASE) -> None:
        self._seconds = lease
        self._ledger = Ledger()
        self._ledger.counts |= {"lost_leases": 0, "lost_rows": 0}
        self._leases: dict[int, _Lease] = {}
        self._last = 0
        self._held: dict[Key, int] = {}
        self._freed: dict[Key, asyncio.Event] = {}
        self._garbage: dict[StoragePlace, None] = {}
        """to be cleared by whoever calls next"""
        self._places: dict[Key, dict[str, int]] = {}
        """columns that are not at place 0"""
        self._lost: dict[StoragePlace, int] = {}
        """places that belong to a lost lease, and its number"""

    async def begin(self, pickled: bytes) -> Reply:
        """A list of requests: enter what needs no data; lease the rows of what does."""
        requests: list[Request] = pickle.loads(pickled)
        number = self._lease()
        return self._reply(number, [self._begin(number, request) for request in requests])

    async def settle(self, number: int, stored: bool) -> Reply:
        """The data of a lease is stored, or could not be; its rows to be cleared are cleared. No answers at all mean
        that nothing was entered."""
        answers: list[ClerkAnswer] = []
        if number not in self._leases:
            self._report(number)
        elif not stored:
            self._lose(number)
        else:
            answers = [self._enter(*entry) for entry in self._leases[number].requests]
            self._end(number)
        return self._reply(self._lease(), answers)

    async def renew(self, number: int) -> None:
        """Whoever holds the lease is still at work."""
        if number in self._leases:
            lease = self._leases[number]
            lease.timer.cancel()
            lease.timer = self._timer(number)

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

    async def columns(self, keys: Sequence[Key], names: Sequence[str]) -> ClerkAnswer:
        """Which of the columns can be read, and those that are not at place 0."""
        try:
            readable = self._ledger.columns(keys, names)
        except (KeyError, ValueError) as error:
            return ClerkAnswer(error=error)
        return ClerkAnswer((readable, {key: self._places[key] for key in keys if key in self._places}))

    async def clear(self, keys: Iterable[Key]) -> Reply:
        self._ledger.clear(keys)
        return self._reply(self._lease(), [])

    async def snapshot(self) -> tuple[dict[str, Any], dict[Key, tuple[str, ...]], dict[Key, dict[str, int]]]:
        """The books, the columns of each row that belongs to them, and those that are not at place 0."""
        held = {key: tuple(row.columns) for key, row in self._ledger.rows().items()}
        return self._ledger.snapshot(), held, self._places

    def _begin(self, number: int, request: Request) -> ClerkAnswer:
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
            return ClerkAnswer(error=error)

    def _begin_put(self, number: int, request: Request) -> ClerkAnswer:
        if request.at in self._held:
            return ClerkAnswer(busy=request.at)
        if self._ledger.admit_row(request.at, request.value, request.of) is None:
            return self._enter(request)
        place = self._hold(number, request, {request.at: None})
        return ClerkAnswer(write=(), place=place) if place else _WRITE

    def _begin_update(self, number: int, request: Request) -> ClerkAnswer:
        """Several updates of one batch may go to the same row, if their columns differ."""
        lease, key = self._leases[number], request.at
        mine = lease.writes.get(key)
        if key in self._held and mine is None:
            return ClerkAnswer(busy=key)
        new = self._ledger.admit_columns(key, request.value)
        if not new:
            return self._enter(request)
        if mine is not None and not mine.isdisjoint(new):
            return ClerkAnswer(busy=key)
        return ClerkAnswer(write=tuple(new), place=self._hold(number, request, {key: {*new, *(mine or ())}}))

    def _begin_restore(self, number: int, request: Request) -> ClerkAnswer:
        """Tried on an empty ledger first: what does not fit is not stored."""
        books, described = request.value
        self._ledger.check_empty()
        Ledger().restore(books, described)
        if taken := next((key for key in described if key in self._held), None):
            return ClerkAnswer(busy=taken)
        return ClerkAnswer(write=(), place=self._hold(number, request, dict.fromkeys(described)))

    def _enter(self, request: Request, place: int = 0) -> ClerkAnswer:
        what, at, value, tags, of = request
        try:
            match what:
                case "put":
                    if self._ledger.put(at, value, tags.get(at), of):
                        self._placed(at, value.columns, place)
                case "update":
                    if place:
                        self._placed(at, self._ledger.admit_columns(at, value) or (), place)
                    return ClerkAnswer(self._ledger.update(at, value))
                case "restore":
                    self._ledger.restore(*value)
                    for key, described in value[1].items():
                        self._placed(key, described.columns, place)
                case "open":
                    self._ledger.open(at, value)
                case "seal":
                    self._ledger.seal(at, value)
                case "fail":
                    self._ledger.fail(at, value)
        except (KeyError, ValueError) as error:
            return ClerkAnswer(error=error)
        return _DONE

    def _lease(self) -> int:
        self._last += 1
        self._leases[self._last] = _Lease(self._timer(self._last))
        return self._last

    def _timer(self, number: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, self._lose, number)

    def _hold(self, number: int, request: Request, rows: Mapping[Key, set[str] | None]) -> int:
        """Lease the rows for this request; returns where to store them."""
        lease = self._leases[number]
        place = number if self._lost and any((key, 0) in self._lost for key in rows) else 0
        lease.requests.append((request, place))
        for key, columns in rows.items():
            self._held[key] = number
            lease.writes[key] = columns
            lease.places[key] = place
        return place

    def _placed(self, key: Key, columns: Iterable[str], place: int) -> None:
        if place:
            self._places.setdefault(key, {}).update(dict.fromkeys(columns, place))

    def _reply(self, number: int, answers: list[ClerkAnswer]) -> Reply:
        """What was dropped and nobody holds is the caller's to clear; a holder learns when it settles."""
        lease = self._leases[number]
        for key in self._ledger.drain():
            self._garbage |= {(key, place): None for place in (0, *self._places.pop(key, {}).values())}
        for place in list(self._garbage):
            if place in self._lost or self._in_use(place):
                del self._garbage[place]
            elif place[0] not in self._held:
                del self._garbage[place]
                lease.clears.append(place)
        self._held.update({key: number for key, _ in lease.clears})
        counts = dict(self._ledger.counts)
        if lease.requests or lease.clears or lease.handed:
            return Reply(number, answers, lease.clears, counts, self._seconds)
        self._end(number)
        return Reply(0, answers, [], counts, self._seconds)

    def _in_use(self, place: StoragePlace) -> bool:
        key, number = place
        return key in self._ledger and number in (0, *self._places.get(key, {}).values())

    def _end(self, number: int) -> _Lease:
        """Let go of the rows. What was stored and is not in the ledger is garbage."""
        lease = self._leases.pop(number)
        lease.timer.cancel()
        for key in {*lease.writes, *(key for key, _ in lease.clears)}:
            del self._held[key]
            if key in self._freed:
                self._freed.pop(key).set()
        self._garbage |= dict.fromkeys(lease.places.items())
        return lease

    def _lose(self, number: int) -> None:
        """Nobody knows what its holder still does: leave it the places that it may write to or clear."""
        lease = self._end(number)
        places = [*lease.places.items(), *lease.clears]
        self._lost |= dict.fromkeys(places, number)
        self._ledger.counts["lost_leases"] += bool(places)
        self._ledger.counts["lost_rows"] += len(places)

    def _report(self, number: int) -> None:
        """The holder of a lost lease is done after all."""
        for place in [place for place, owner in self._lost.items() if owner == number]:
            del self._lost[place]
            self._garbage[place] = None
