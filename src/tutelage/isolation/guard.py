"""The process between an isolated program and whoever started it: `python -m tutelage.isolation.guard ORDER`.

It starts the program in a process of its own, passes on what it prints, and watches its memory, its number of processes
and its output a few times a second. When one of them passes its limit, when the program ends, or when whoever started
it closes the control socket or dies, everything that the program has started is killed, whatever group or session it
has moved to, and its scratch directory is removed.

On the control socket it sends two lines of JSON: `Began` and, as the last thing it does, `Ended`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypedDict

from tutelage.isolation import namespaces

TICK = 0.05
"""Seconds between two looks at memory and processes."""

CLEANED = 10.0
"""Seconds in which killed processes must be gone."""

_PIPE = 4096
"""Bytes that a pipe which is ready takes without blocking."""


class Launch(TypedDict):
    """What to start and what it may use. It is an argument of the guard, which everybody can see: it holds no keys."""

    program: list[str]
    """`-m module arguments`: Python's own module, without starting another Python; else a command"""
    control: int
    """descriptor of the control socket"""
    parent: int
    scratch: str
    """directory that is removed at the end"""
    network: bool
    memory: int
    """bytes of resident memory, of all its processes together"""
    processes: int
    output: int
    """bytes that it may print in one second"""


class Began(TypedDict):
    pid: int
    gaps: list[str]
    """what the kernel did not let the guard isolate"""


class Ended(TypedDict):
    how: str
    """exit status N, signal NAME"""
    broke: str
    """memory, processes, output: the limit that was passed; empty if none was"""
    why: str


class _Broke(Exception):
    def __init__(self, limit: str, why: str) -> None:
        super().__init__(why)
        self.limit = limit


class _Over(Exception):
    """Whoever started the program wants it to end, or is gone."""


def main(argv: Sequence[str]) -> None:
    order: Launch = json.loads(argv[1])
    control = socket.socket(fileno=os.dup(order["control"]))  # a small number, and not inheritable
    os.close(order["control"])
    namespaces.adopt_orphans()
    said, says = os.pipe()
    program = _start(order, control, said, says)
    os.close(says)
    ended = _Guard(order, control, program, said).watch()
    with suppress(OSError):
        control.sendall(_line(ended))
    os._exit(0)


def _line(message: Began | Ended) -> bytes:
    return json.dumps(message).encode() + b"\n"


# --- the start --------------------------------------------------------------------------------------------------------


def _start(order: Launch, control: socket.socket, said: int, says: int) -> int:
    """Fork the program's process; returns its id when it has given up what it can."""
    guard = os.getpid()
    here, there = socket.socketpair()
    program = os.fork()
    if program == 0:
        here.close()
        os.close(said)
        _become(order, control, there, says, guard)
    there.close()
    with here:
        if here.recv(1):
            namespaces.map_own_ids(program)
            with suppress(OSError):
                here.sendall(b".")
    for fd in _passed_on():
        os.close(fd)
    return program


def _become(order: Launch, control: socket.socket, guard: socket.socket, says: int, parent: int) -> NoReturn:
    """In the new process: give up what it must not have, and run the program."""
    status = 1
    try:
        os.setsid()
        os.dup2(says, 1)
        os.dup2(says, 2)
        os.close(says)

        def map_ids() -> None:
            guard.sendall(b".")
            guard.recv(1)

        gaps = [*namespaces.give_up(order["network"], map_ids), *_unwatched()]
        guard.close()
        namespaces.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        control.sendall(_line({"pid": os.getpid(), "gaps": gaps}))
        control.close()
        status = _run(order["program"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(program: list[str]) -> int:
    if program[0] != "-m":
        os.execvp(program[0], program)
    import runpy

    sys.argv = program[1:]
    try:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _passed_on() -> list[int]:
    """Descriptors that are the program's alone."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd" if namespaces.LINUX else "/dev/fd")):
        with suppress(OSError):  # that of the listing is closed by now
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return found


# --- the watch --------------------------------------------------------------------------------------------------------


class _Guard:
    def __init__(self, order: Launch, control: socket.socket, program: int, said: int) -> None:
        self.order, self.control, self.program, self.said = order, control, program, said
        self.status: int | None = None
        self.pending = b""
        """of what the program printed: not passed on yet"""
        self.second, self.printed = time.monotonic(), 0
        os.set_blocking(said, False)

    def watch(self) -> Ended:
        """Until the program ends or has to; when this returns, nothing of it is left."""
        broke = why = ""
        try:
            self._watch()
        except _Broke as passed:
            broke, why = passed.limit, str(passed)
        except _Over:
            pass
        gone = self._kill()
        self._last_words()
        _remove(self.order["scratch"])
        how = _how(self.status) if gone else f"it could not be killed in {CLEANED:g} s"
        return {"how": how, "broke": broke, "why": why}

    def _watch(self) -> None:
        wake, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        looked = 0.0
        hears = [self.said]
        while not self._reap():
            listen: list[Any] = [self.control, wake, *(hears if not self.pending else [])]
            ready, writable, _ = select.select(listen, [2] if self.pending else [], [], TICK)
            if self.control in ready and not self.control.recv(_PIPE):
                raise _Over
            if wake in ready:
                os.read(wake, _PIPE)
            if self.said in ready and not self._listen():
                hears = []
            if writable:
                self._pass_on()
            if (now := time.monotonic()) - looked >= TICK:
                looked = now
                self._look()

    def _reap(self) -> bool:
        """Whether the program has ended; also buries orphans."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.program:
                    self.status = status
        return self.status is not None

    def _look(self) -> None:
        if os.getppid() != self.order["parent"]:
            raise _Over
        resident = {pid: pages for pid in descendants(os.getpid()) if (pages := _resident(pid))}
        if len(resident) > self.order["processes"]:
            raise _Broke("processes", f"it ran {len(resident)} processes, allowed are {self.order['processes']}")
        if sum(resident.values()) > self.order["memory"]:
            # pages that several processes share are counted once, which takes longer
            held = sum(resident.values()) if len(resident) == 1 else sum(map(_proportional, resident))
            if held > self.order["memory"]:
                raise _Broke("memory", f"it held {_giga(held)} GB of memory, allowed are {_giga(self.order['memory'])}")

    def _listen(self) -> bool:
        """Read what was printed; False at its end."""
        try:
            self.pending = os.read(self.said, _PIPE)
        except BlockingIOError:
            return True
        if time.monotonic() - self.second >= 1:
            self.second, self.printed = time.monotonic(), 0
        self.printed += len(self.pending)
        if self.printed > self.order["output"]:
            why = f"it printed more than {self.order['output'] / 1e6:g} MB in a second, which is not allowed"
            raise _Broke("output", why)
        return bool(self.pending)

    def _pass_on(self) -> None:
        try:
            self.pending = self.pending[os.write(2, self.pending) :]
        except OSError:
            self.pending = b""  # nobody reads it

    def _last_words(self) -> None:
        """What was printed before the end and can be passed on at once."""
        with suppress(_Broke, OSError):
            while (self.pending or self._listen()) and select.select([], [2], [], 0)[1]:
                if not self.pending:
                    break
                self._pass_on()

    def _kill(self) -> bool:
        """Everything at once, again and again, since processes may start others meanwhile."""
        until = time.monotonic() + CLEANED
        while time.monotonic() < until:
            there = descendants(os.getpid())
            if not there and (self._reap() or not namespaces.LINUX):
                return True
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in there or [self.program]:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            self._reap()
            time.sleep(0.001)
        return False


def _unwatched() -> list[str]:
    """What the limits do not apply to where the kernel does not list the children of a process."""
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return []
    return [
        "the kernel does not list the children of a process here: memory, processes and output of what a reward starts "
        "are not limited, and they are not killed with it"
    ]


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    look = [pid]
    while look:
        children = list(_children(look.pop()))
        found += children
        look += children
    return found


def _children(pid: int) -> Iterator[int]:
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                yield from map(int, file.read().split())
    except OSError:
        return


def _resident(pid: int) -> int:
    """Bytes of resident memory; 0 of one that has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Bytes of resident memory, of shared pages its part."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)


def _giga(count: int) -> str:
    return f"{count / 1e9:.3g}"


def _how(status: int | None) -> str:
    if status is None:
        return "not known"
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv)
