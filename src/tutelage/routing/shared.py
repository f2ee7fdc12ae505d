"""One desk for the routers of all processes: fewest in flight, stickiness and bounds are those of the whole run.

worker ──asks, places given back──► coordinator: a LocalDesk for the student, each teacher, the reference
worker ◄──places───────────────────   (at once, or when one has room)

A process has one such message under way. What its routers say meanwhile goes together in the next one, so the cost of a
request falls as there are more of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from tutelage.routing.router import LocalDesk

STUDENT, REFERENCE = "student", "reference"


def of_teacher(name: str) -> str:
    """Desks have the names of whom they serve."""
    return f"teacher {name!r}"


class Ask(NamedTuple):
    """A request wants a replica."""

    ticket: int
    desk: str
    sticky: Hashable
    """of plain types: the coordinator knows no others"""
    without: tuple[int, ...]


class Give(NamedTuple):
    """A place is free again."""

    desk: str
    sticky: Hashable
    number: int
    answered: bool


Said = Sequence[Ask | Give]
Grant = tuple[int, int]
"""The number of a ticket, and of the replica it was given."""


class _Guest:
    """A process that asks."""

    def __init__(self) -> None:
        self.held: Counter[tuple[str, int]] = Counter()
        """places by desk and replica"""
        self.waits: set[asyncio.Future[int]] = set()
        self.granted: list[Grant] = []
        """to those who waited"""
        self.news = asyncio.Event()
        self.left = False


class Desks:
    """Where all processes of a run ask."""

    def __init__(self, replicas: Mapping[str, int], limit: int | None) -> None:
        self.desks = {name: LocalDesk(number, limit) for name, number in replicas.items()}
        self._guests: dict[str, _Guest] = {}

    def enter(self, who: str) -> None:
        """A process begins, perhaps in the place of one that died: what that one held is free."""
        self.leave(who)
        self._guests[who] = _Guest()

    def leave(self, who: str) -> None:
        """A process is gone. Safe to repeat."""
        if (guest := self._guests.pop(who, None)) is None:
            return
        guest.left = True
        guest.news.set()
        for place in guest.waits:
            place.cancel()
        for name, number in guest.held.elements():
            self.desks[name].give(None, number, answered=False)

    def exchange(self, who: str, said: Said) -> list[Grant]:
        """What can be granted at once; the others line up."""
        guest = self._guests[who]
        granted: list[Grant] = []
        for word in said:
            desk = self.desks[word.desk]
            if isinstance(word, Give):
                guest.held[word.desk, word.number] -= 1
                desk.give(word.sticky, word.number, word.answered)
            elif (number := desk.seat(word.sticky, word.without)) is not None:
                guest.held[word.desk, number] += 1
                granted.append((word.ticket, number))
            else:
                self._line_up(guest, desk, word)
        return granted

    def _line_up(self, guest: _Guest, desk: LocalDesk, ask: Ask) -> None:
        def granted(place: asyncio.Future[int]) -> None:
            guest.waits.discard(place)
            if place.cancelled():
                return
            if guest.left:
                desk.give(None, place.result(), answered=False)
                return
            guest.held[ask.desk, place.result()] += 1
            guest.granted.append((ask.ticket, place.result()))
            guest.news.set()

        place = desk.line_up(ask.sticky, ask.without)
        guest.waits.add(place)
        place.add_done_callback(granted)

    async def granted(self, who: str) -> list[Grant]:
        """Wait for places of those who lined up."""
        guest = self._guests[who]
        await guest.news.wait()
        guest.news.clear()
        found, guest.granted = guest.granted, []
        return found


class Call(NamedTuple):
    """How the coordinator is reached."""

    exchange: Callable[[str, Said], Awaitable[list[Grant]]]
    granted: Callable[[str], Awaitable[list[Grant]]]


class SharedDesks:
    """The desks as one process sees them."""

    def __init__(self, who: str, call: Call) -> None:
        self._who, self._call = who, call
        self._tickets = count()
        self._open: dict[int, tuple[str, asyncio.Future[int]]] = {}
        """who waits for a place, also those who have given up: theirs is given back when it comes"""
        self._lined_up: set[int] = set()
        self._said: list[Ask | Give] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __getitem__(self, name: str) -> SharedDesk:
        return SharedDesk(self, name)

    async def take(self, desk: str, sticky: Hashable, without: Collection[int]) -> int:
        ticket = next(self._tickets)
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[ticket] = (desk, place)
        self._say(Ask(ticket, desk, sticky, tuple(without)))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._say(Give(desk, None, place.result(), answered=False))
            raise

    def give(self, desk: str, sticky: Hashable, number: int, answered: bool) -> None:
        self._say(Give(desk, sticky, number, answered))

    def _say(self, word: Ask | Give) -> None:
        self._said.append(word)
        self._see_to("tell", self._tell)

    def _see_to(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Each kind of work is under way once at most."""
        if what not in self._tasks:
            self._tasks[what] = asyncio.create_task(self._done(what, work))

    async def _done(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._fail(error)
        finally:
            del self._tasks[what]

    async def _tell(self) -> None:
        while self._said:
            said, self._said = self._said, []
            self._deliver(await self._call.exchange(self._who, said))
            self._lined_up.update(word.ticket for word in said if isinstance(word, Ask) and word.ticket in self._open)
            if self._lined_up:
                self._see_to("listen", self._listen)

    async def _listen(self) -> None:
        while self._lined_up:
            self._deliver(await self._call.granted(self._who))

    def _deliver(self, grants: list[Grant]) -> None:
        for ticket, number in grants:
            desk, place = self._open.pop(ticket)
            self._lined_up.discard(ticket)
            if place.done():
                self._say(Give(desk, None, number, answered=False))
            else:
                place.set_result(number)

    def _fail(self, error: Exception) -> None:
        waiting, self._open = self._open, {}
        self._lined_up.clear()
        for _, place in waiting.values():
            if not place.done():
                place.set_exception(error)


class SharedDesk:
    """One of them, as a router sees it."""

    def __init__(self, desks: SharedDesks, name: str) -> None:
        self._desks, self._name = desks, name

    async def take(self, sticky: Hashable, without: Collection[int]) -> int:
        return await self._desks.take(self._name, sticky, without)

    def give(self, sticky: Hashable, number: int, answered: bool) -> None:
        self._desks.give(self._name, sticky, number, answered)
