"""One worker process as the pool holds it: started in isolation, talked to over a socket, killed, reaped."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from collections import deque
from contextlib import suppress
from typing import cast

from tutelage.errors import UserError
from tutelage.isolation.contract import Isolation
from tutelage.isolation.guard import Ended
from tutelage.isolation.process import IsolatedProcess
from tutelage.rewards.contract import Work
from tutelage.rewards.processes import wire

START_DEADLINE = 120.0
"""Seconds to start Python and load the plugins, which may import torch on a busy machine."""


LAST_MOMENT = 1.0
"""Seconds from the end of a worker's socket to the end of its process."""


LONGEST_REPORT = 1 << 20
"""Bytes of one message from a worker."""


class WorkerLost(ConnectionError):
    """The process is gone, or closed its end."""


class _Link(asyncio.Protocol):
    """The pool's end of the socket.

    The loop handles what has arrived before it handles timers that are due. So a reply that came in time counts even
    if the loop was busy elsewhere until after the timeout. What a process had said before it ended counts as well, if
    its end is noticed by writing to it.
    """

    def __init__(self, ours: socket.socket) -> None:
        self.lost = False
        self._ours = ours
        self.garbled: str | None = None
        """what is wrong with the bytes that came, if they are no reports"""
        self._frames = wire.Frames(LONGEST_REPORT)
        self._transport: asyncio.Transport | None = None
        self._inbox: deque[wire.WorkerMessage] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._deaf = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.garbled is not None:
            return
        try:
            self._inbox.extend(cast(wire.WorkerMessage, json.loads(message)) for message in self._frames.feed(data))
        except ValueError as error:
            self.garbled = str(error)
            if self._transport is not None:
                self._transport.abort()
        if self._inbox:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The loop stops reading when a write fails, whatever there was to read; it closes the socket after this."""
        with suppress(OSError):
            while data := self._ours.recv(65536):
                self.data_received(data)
        self.lost = True
        self._wake()

    def forget(self) -> None:
        """Nothing that was said, or will be, is of interest any more."""
        self._deaf = True
        self._inbox.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self, seconds: float) -> wire.WorkerMessage:
        """The next report. TimeoutError if none comes in that time, WorkerLost if none can come any more."""
        if not self._inbox and not self.lost:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._inbox:
            return self._inbox.popleft()
        raise WorkerLost if self.lost else TimeoutError


class WorkerProcess:
    """A process that is ready to judge answers. Made by `launch`. It judges in the order in which answers are sent;
    whoever sent one takes its turn, and then receives. That may be after the process ended: what it had said counts."""

    def __init__(self, process: IsolatedProcess, link: _Link, transport: asyncio.Transport) -> None:
        self._process = process
        self._link = link
        self._transport = transport
        self._killed = False
        self.spent = False
        """it was lost to an answer; those that were sent after that one are for another worker"""
        self.turn = asyncio.Lock()
        """held by whoever receives; a lock is taken in the order in which it was asked for"""

    @classmethod
    async def open(cls, isolation: Isolation) -> WorkerProcess:
        """Start Python. It uses one thread, and iterates over sets in the same order every time."""
        ours, theirs = socket.socketpair()
        program = ["-m", "tutelage.rewards.processes.worker", str(theirs.fileno())]
        extra = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        try:
            with theirs:
                process = IsolatedProcess.start(program, isolation, pass_fds=[theirs.fileno()], extra=extra)
        except BaseException:
            ours.close()
            raise
        try:
            transport, link = await asyncio.get_running_loop().create_unix_connection(lambda: _Link(ours), sock=ours)
        except BaseException:
            ours.close()
            process.end()
            raise
        return cls(process, link, transport)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        return not self._killed and not self._link.lost

    def send(self, frame: bytes) -> None:
        self._transport.write(frame)

    async def receive(self, seconds: float) -> wire.WorkerMessage:
        return await self._link.receive(seconds)

    @property
    def gaps(self) -> list[str]:
        """What the kernel did not let us isolate."""
        return self._process.gaps

    async def prepare(self, work: Work, deadline: float) -> None:
        """Have plugins loaded and settings checked. UserError if they are refused or the worker does not get there."""
        self.send(wire.frame(pickle.dumps(work)))
        plugins = work.plugins
        loading = f" while it loaded the plugins {', '.join(plugins)}" if plugins else ""
        try:
            report = await self.receive(deadline)
        except TimeoutError:
            raise UserError(f"rewards: a worker process was not ready after {deadline:g} s{loading}") from None
        except WorkerLost:
            ended, when = await self.end(), loading or " at its start"
            if ended["broke"]:
                raise UserError(f"rewards: a worker process was stopped{when}: {ended['why']}") from None
            raise UserError(f"rewards: a worker process ended{when} ({ended['how']})") from None
        if report["kind"] == "refused":
            raise UserError("\n".join(report["problems"]))

    def kill(self) -> None:
        """SIGKILL to the process and to whatever it started. Safe to repeat."""
        if not self._killed:
            self._killed = True
            self._process.kill()
            self._transport.abort()

    def spend(self) -> None:
        """Kill it because of the answer whose turn it is; what it says later is not about those behind."""
        self.spent = True
        self._link.forget()
        self.kill()

    async def end(self) -> Ended:
        """Of one that has closed its end: it gets a moment to die by itself, so that how it ended is its own doing."""
        if self._link.garbled is not None:
            self.kill()
            return {**await self.reap(), "broke": "output", "why": f"it sent {self._link.garbled}"}
        with suppress(TimeoutError):
            await asyncio.to_thread(self._process.wait, LAST_MOMENT)
        self.kill()
        return await self.reap()

    async def reap(self) -> Ended:
        """Wait until the killed process is gone, with all that it started; says how it ended."""
        return await asyncio.to_thread(self._process.end)


async def launch(work: Work, isolation: Isolation, deadline: float) -> WorkerProcess:
    """A worker that is ready. Whatever goes wrong, and if this is cancelled, no process is left."""
    worker = await WorkerProcess.open(isolation)
    try:
        await worker.prepare(work, deadline)
    except BaseException:
        worker.kill()
        await worker.reap()
        raise
    return worker
