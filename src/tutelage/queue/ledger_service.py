"""The server side of a distributed queue: one ledger for many processes, whose tensors are stored elsewhere.

A process calls `begin` before it writes and `settle` when the data is stored. In between it holds a lease on the rows
and renews it, so that no other process writes the same columns or clears them. Dropped rows are leased in the same way
to the process that clears them from storage.

A lease is lost if it is not renewed in time, because its process has died or is suspended and may continue later, or if
its write failed, because parts of the write may still be under way. The places in storage that a lost lease holds are
reserved for its process: no other process reads, writes or clears them until that process reports back. The rows
themselves are free, and the next writer stores them at a new place. So late data cannot overwrite anything, even if
storage has reused a slot for another row. Lost leases and their rows are counted.
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
"""Seconds after which a lease is lost unless it is renewed."""

StoragePlace = tuple[Key, int]
"""Where a row, or some of its columns, is stored: the key and a number. The number is 0, or, if place 0 is held by a
lost lease, the number of the lease that wrote the data."""


class Request(NamedTuple):
    """One call of a writer, without the data."""

    what: Literal["open", "put", "update", "seal", "fail", "restore"]
    at: Any
    """a group, an episode or a key"""
    value: Any
    """the samples, count or reason; the result of `describe` for columns; for restore, the ledger's snapshot and the
    descriptions of its rows"""
    tags: Mapping[Key, Tags] = {}  # never changed
    """tags of the rows that it puts"""
    of: int | None = None
    """number of trajectories of the episode, if a put also seals it"""


class LedgerAnswer(NamedTuple):
    """The result of a request, or what the writer must do first."""

    value: Any = None
    error: Exception | None = None
    write: tuple[str, ...] | None = None
    """the columns to store before the request is entered; empty means all of them"""
    place: int = 0
    """the place to store them at"""
    busy: Key | None = None
    """a row that another writer holds: retry when it is free"""


_DONE, _WRITE = LedgerAnswer(), LedgerAnswer(write=())
"""The most common answers. A message that repeats the same object pickles small."""


class Reply(NamedTuple):
    """The reply to one call."""

    lease: int
    """the lease to settle; 0 if there is none"""
    answers: list[LedgerAnswer]
    clear: list[StoragePlace]
    """places to clear from storage before settling"""
    counts: dict[str, int]
    seconds: float
    """time within which the lease must be renewed"""


@dataclass(slots=True)
class _Lease:
    timer: asyncio.TimerHandle
    writes: dict[Key, set[str] | None] = field(default_factory=dict)
    """columns of each row that are being written; None means the whole row"""
    clears: list[StoragePlace] = field(default_factory=list)
    requests: list[tuple[Request, int]] = field(default_factory=list)
    """requests to enter once their data is stored, with the place of the data"""
    places: dict[Key, int] = field(default_factory=dict)
    """the places that rows are being written to"""
    handed: Mapping[GroupKey, Group] = field(default_factory=dict)
    """groups handed out to a taker that has not settled yet"""


class LedgerService:
    """Serves the ledger to all processes; runs as a Ray actor.

    Errors are returned in answers, because Ray would wrap exceptions that are raised.
    """

    def __init__(self, lease: float = LEASE) -> None:
        self._seconds = lease
        self._ledger = Ledger()
        self._ledger.counts |= {"lost_leases": 0, "lost_rows": 0}
        self._leases: dict[int, _Lease] = {}
        self._last = 0
        self._held: dict[Key, int] = {}
        self._freed: dict[Key, asyncio.Event] = {}
        self._garbage: dict[StoragePlace, None] = {}
        """places for the next caller to clear"""
        self._places: dict[Key, dict[str, int]] = {}
        """the places of columns that are not at place 0"""
        self._lost: dict[StoragePlace, int] = {}
        """places held by a lost lease, and the number of the lease"""

    async def begin(self, pickled: bytes) -> Reply:
        """Handle a list of requests: enter those that need no data, and lease the rows of the others."""
        requests: list[Request] = pickle.loads(pickled)
        number = self._lease()
        return self._reply(number, [self._begin(number, request) for request in requests])

    async def settle(self, number: int, stored: bool) -> Reply:
        """End a lease: its data is stored (or could not be), and its places to clear are cleared.

        An empty list of answers means that nothing was entered.
        """
        answers: list[LedgerAnswer] = []
        if number not in self._leases:
            self._report(number)
        elif not stored:
            self._lose(number)
        else:
            answers = [self._enter(*entry) for entry in self._leases[number].requests]
            self._end(number)
        return self._reply(self._lease(), answers)

    async def renew(self, number: int) -> None:
        """Restart the timer of a lease."""
        if number in self._leases:
            lease = self._leases[number]
            lease.timer.cancel()
            lease.timer = self._timer(number)

    async def free(self, key: Key) -> None:
        """Wait until no lease holds the row."""
        while key in self._held:
            await self._freed.setdefault(key, asyncio.Event()).wait()

    async def ready(
        self, partition: str, needs: Sequence[str], groups: int, left: float | None, deadline: float | None
    ) -> Exception | None:
        """Wait until enough groups can be taken; `left` is the rest of the taker's deadline, in seconds."""
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
        """Return groups to the queue whose taker was cancelled before it used them."""
        self._ledger.give_back(self._leases[number].handed)
        self._end(number)

    async def columns(self, keys: Sequence[Key], names: Sequence[str]) -> LedgerAnswer:
        """Return which of the columns can be read, and the places of those that are not at place 0."""
        try:
            readable = self._ledger.columns(keys, names)
        except (KeyError, ValueError) as error:
            return LedgerAnswer(error=error)
        return LedgerAnswer((readable, {key: self._places[key] for key in keys if key in self._places}))

    async def clear(self, keys: Iterable[Key]) -> Reply:
        self._ledger.clear(keys)
        return self._reply(self._lease(), [])

    async def snapshot(self) -> tuple[dict[str, Any], dict[Key, tuple[str, ...]], dict[Key, dict[str, int]]]:
        """Return a snapshot of the ledger, the columns of each row, and the places of those that are not at place 0."""
        held = {key: tuple(row.columns) for key, row in self._ledger.rows().items()}
        return self._ledger.snapshot(), held, self._places

    def _begin(self, number: int, request: Request) -> LedgerAnswer:
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
            return LedgerAnswer(error=error)

    def _begin_put(self, number: int, request: Request) -> LedgerAnswer:
        if request.at in self._held:
            return LedgerAnswer(busy=request.at)
        if self._ledger.admit_row(request.at, request.value, request.of) is None:
            return self._enter(request)
        place = self._hold(number, request, {request.at: None})
        return LedgerAnswer(write=(), place=place) if place else _WRITE

    def _begin_update(self, number: int, request: Request) -> LedgerAnswer:
        """Lease the columns of an update. One lease may hold several updates of a row, if their columns differ."""
        lease, key = self._leases[number], request.at
        mine = lease.writes.get(key)
        if key in self._held and mine is None:
            return LedgerAnswer(busy=key)
        new = self._ledger.admit_columns(key, request.value)
        if not new:
            return self._enter(request)
        if mine is not None and not mine.isdisjoint(new):
            return LedgerAnswer(busy=key)
        return LedgerAnswer(write=tuple(new), place=self._hold(number, request, {key: {*new, *(mine or ())}}))

    def _begin_restore(self, number: int, request: Request) -> LedgerAnswer:
        """Lease the rows of a snapshot, after a trial on an empty ledger, so that a bad snapshot is not stored."""
        saved, described = request.value
        self._ledger.check_empty()
        Ledger().restore(saved, described)
        if taken := next((key for key in described if key in self._held), None):
            return LedgerAnswer(busy=taken)
        return LedgerAnswer(write=(), place=self._hold(number, request, dict.fromkeys(described)))

    def _enter(self, request: Request, place: int = 0) -> LedgerAnswer:
        what, at, value, tags, of = request
        try:
            match what:
                case "put":
                    if self._ledger.put(at, value, tags.get(at), of):
                        self._placed(at, value.columns, place)
                case "update":
                    if place:
                        self._placed(at, self._ledger.admit_columns(at, value) or (), place)
                    return LedgerAnswer(self._ledger.update(at, value))
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
            return LedgerAnswer(error=error)
        return _DONE

    def _lease(self) -> int:
        self._last += 1
        self._leases[self._last] = _Lease(self._timer(self._last))
        return self._last

    def _timer(self, number: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, self._lose, number)

    def _hold(self, number: int, request: Request, rows: Mapping[Key, set[str] | None]) -> int:
        """Lease the rows for this request. Returns the place to store them at."""
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

    def _reply(self, number: int, answers: list[LedgerAnswer]) -> Reply:
        """Build a reply. The caller clears dropped rows that no lease holds; a held row is cleared after its lease
        ends."""
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
        """Release the rows of a lease. Stored data that is not in the ledger becomes garbage."""
        lease = self._leases.pop(number)
        lease.timer.cancel()
        for key in {*lease.writes, *(key for key, _ in lease.clears)}:
            del self._held[key]
            if key in self._freed:
                self._freed.pop(key).set()
        self._garbage |= dict.fromkeys(lease.places.items())
        return lease

    def _lose(self, number: int) -> None:
        """Mark a lease as lost, and reserve the places that its process may still write to or clear."""
        lease = self._end(number)
        places = [*lease.places.items(), *lease.clears]
        self._lost |= dict.fromkeys(places, number)
        self._ledger.counts["lost_leases"] += bool(places)
        self._ledger.counts["lost_rows"] += len(places)

    def _report(self, number: int) -> None:
        """Free the places of a lost lease whose process has reported back."""
        for place in [place for place, owner in self._lost.items() if owner == number]:
            del self._lost[place]
            self._garbage[place] = None
