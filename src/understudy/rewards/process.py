"""One worker process as the pool holds it: started, talked to over a socket, killed, reaped."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

from understudy.errors import UserError
from understudy.rewards import wire
from understudy.rewards.contract import RewardSpec

START_DEADLINE = 120.0
"""Seconds to start Python and load the plugins, which may import torch on a busy machine."""


LAST_MOMENT = 1.0
"""Seconds from the end of a worker's socket to the end of its process."""


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
        self._frames = wire.Frames()
        self._inbox: deque[wire.Report] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._deaf = False

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._inbox.extend(cast(wire.Report, json.loads(message)) for message in self._frames.feed(data))
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

    async def receive(self, seconds: float) -> wire.Report:
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

    def __init__(self, process: subprocess.Popen[bytes], link: _Link, transport: asyncio.Transport) -> None:
        self._process = process
        self._link = link
        self._transport = transport
        self._killed = False
        self.spent = False
        """it was lost to an answer; those that were sent after that one are for another worker"""
        self.turn = asyncio.Lock()
        """held by whoever receives; a lock is taken in the order in which it was asked for"""

    @classmethod
    async def open(cls) -> WorkerProcess:
        """Start Python. The caller's thread becomes the one whose end ends the worker, so it must be the loop's."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "understudy.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                process = subprocess.Popen(
                    command,
                    env=_environment(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        try:
            transport, link = await asyncio.get_running_loop().create_unix_connection(lambda: _Link(ours), sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
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

    async def receive(self, seconds: float) -> wire.Report:
        return await self._link.receive(seconds)

    async def prepare(self, specs: Mapping[str, RewardSpec], plugins: Sequence[str], deadline: float) -> None:
        """Have plugins loaded and settings checked. UserError if they are refused or the worker does not get there."""
        self.send(wire.frame(pickle.dumps((dict(specs), tuple(plugins)))))
        loading = f" while it loaded the plugins {', '.join(plugins)}" if plugins else ""
        try:
            report = await self.receive(deadline)
        except TimeoutError:
            raise UserError(f"rewards: a worker process was not ready after {deadline:g} s{loading}") from None
        except WorkerLost:
            status = await self.end()
            ended = loading or " at its start"
            raise UserError(f"rewards: a worker process ended{ended} ({status})") from None
        if report["kind"] == "refused":
            raise UserError("\n".join(report["problems"]))

    def kill(self) -> None:
        """SIGKILL to the process and to whatever it started in its group. Safe to repeat."""
        if not self._killed:
            self._killed = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._transport.abort()

    def spend(self) -> None:
        """Kill it because of the answer whose turn it is; what it says later is not about those behind."""
        self.spent = True
        self._link.forget()
        self.kill()

    async def end(self) -> str:
        """Of one that has closed its end: it gets a moment to die by itself, so that how it ended is its own doing."""
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, LAST_MOMENT)
        self.kill()
        return await self.reap()

    async def reap(self) -> str:
        """Wait until the killed process is gone; says how it ended."""
        code = await asyncio.to_thread(self._process.wait)
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _environment() -> dict[str, str]:
    """The worker finds the same modules, uses one thread, and iterates over sets in the same order every time."""
    paths = os.pathsep.join(sys.path)
    return {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


async def launch(specs: Mapping[str, RewardSpec], plugins: Sequence[str], deadline: float) -> WorkerProcess:
    """A worker that is ready. Whatever goes wrong, and if this is cancelled, no process is left."""
    worker = await WorkerProcess.open()
    try:
        await worker.prepare(specs, plugins, deadline)
    except BaseException:
        worker.kill()
        await worker.reap()
        raise
    return worker
