"""The pool's side of one worker process: start it in isolation, exchange messages over a socket, kill and reap it."""

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
"""Seconds to start Python and load the plugins, which may import torch, on a busy machine."""


LAST_MOMENT = 1.0
"""Seconds within which a process must end after its socket is closed."""


LONGEST_REPORT = 1 << 20
"""Maximum number of bytes of a message from a worker."""


class WorkerLost(ConnectionError):
    """The process has ended, or closed its end of the socket."""


class _Link(asyncio.Protocol):
    """The pool's end of the socket.

    The event loop handles received data before timers that are due, so a reply that arrives in time counts even if the
    loop was busy until after the timeout. Messages that a process sent before it ended count as well, even if its end
    is first noticed by a failed write.
    """

    def __init__(self, ours: socket.socket) -> None:
        self.lost = False
        self._ours = ours
        self.garbled: str | None = None
        """what is wrong with the received bytes, if they are not reports"""
        self._frames = wire.Frames(LONGEST_REPORT)
        self._transport: asyncio.Transport | None = None
        self._inbox: deque[wire.WorkerMessage] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ignoring = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ignoring or self.garbled is not None:
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
        """Read the remaining data: the loop stops reading when a write fails, and closes the socket after this."""
        with suppress(OSError):
            while data := self._ours.recv(65536):
                self.data_received(data)
        self.lost = True
        self._wake()

    def forget(self) -> None:
        """Ignore all reports, those received and those still to come."""
        self._ignoring = True
        self._inbox.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self, seconds: float) -> wire.WorkerMessage:
        """Return the next report. Raises TimeoutError after `seconds`, and WorkerLost if the worker has gone."""
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
    """A process that is ready to score answers, created by `launch`.

    It scores answers in the order in which they are sent. The sender of an answer acquires `turn` and then receives,
    possibly after the process has ended: reports that it sent before still count.
    """

    def __init__(self, process: IsolatedProcess, link: _Link, transport: asyncio.Transport) -> None:
        self._process = process
        self._link = link
        self._transport = transport
        self._killed = False
        self.spent = False
        """it was lost to an answer; answers that were sent later need another worker"""
        self.turn = asyncio.Lock()
        """held by the sender that receives; the lock is fair, so turns follow the order of answers"""

    @classmethod
    async def open(cls, isolation: Isolation) -> WorkerProcess:
        """Start Python with one thread and a fixed hash seed, so that sets are iterated in a fixed order."""
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
        """What the kernel does not allow to isolate."""
        return self._process.gaps

    async def prepare(self, work: Work, deadline: float) -> None:
        """Load plugins and check settings. Raises UserError if they are refused or the worker does not become ready."""
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
        """Kill the process and all that it started. Safe to repeat."""
        if not self._killed:
            self._killed = True
            self._process.kill()
            self._transport.abort()

    def spend(self) -> None:
        """Kill the worker because of the current answer, and ignore its later reports."""
        self.spent = True
        self._link.forget()
        self.kill()

    async def end(self) -> Ended:
        """Return how a process that closed its socket ended. It gets a moment to exit by itself before it is killed."""
        if self._link.garbled is not None:
            self.kill()
            return {**await self.reap(), "broke": "output", "why": f"it sent {self._link.garbled}"}
        with suppress(TimeoutError):
            await asyncio.to_thread(self._process.wait, LAST_MOMENT)
        self.kill()
        return await self.reap()

    async def reap(self) -> Ended:
        """Wait until the killed process and all that it started are gone. Returns how it ended."""
        return await asyncio.to_thread(self._process.end)


async def launch(work: Work, isolation: Isolation, deadline: float) -> WorkerProcess:
    """Start a worker and wait until it is ready. After an error or a cancellation, no process is left."""
    worker = await WorkerProcess.open(isolation)
    try:
        await worker.prepare(work, deadline)
    except BaseException:
        worker.kill()
        await worker.reap()
        raise
    return worker
