"""The process between an isolated program and its parent: `python -m tutelage.isolation.guard ORDER`.

It starts the program in a child process, forwards its output, and monitors its memory, number of processes and output
several times per second. When a limit is exceeded, the program ends, or the parent closes the control socket or dies,
the guard kills everything that the program has started, in whatever process group or session it is, and removes the
scratch directory.

It sends two lines of JSON on the control socket: `Began` and, at the very end, `Ended`.
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
"""Seconds between two checks of memory and processes."""

CLEANED = 10.0
"""Seconds within which killed processes must be gone."""

_PIPE = 4096
"""Bytes that a writable pipe accepts without blocking."""


class Launch(TypedDict):
    """What to start, and its limits. It is passed as a command-line argument, visible to all, so it holds no keys."""

    program: list[str]
    """`-m module arguments` for a module, which runs in the same Python; otherwise a command"""
    control: int
    """file descriptor of the control socket"""
    parent: int
    scratch: str
    """directory that is removed at the end"""
    network: bool
    memory: int
    """limit of resident memory of all its processes together, in bytes"""
    processes: int
    output: int
    """output limit in bytes per second"""


class Began(TypedDict):
    pid: int
    gaps: list[str]
    """what the kernel does not allow to isolate"""


class Ended(TypedDict):
    how: str
    """exit status N or signal NAME"""
    broke: str
    """the limit that was exceeded: memory, processes or output; empty if none was"""
    why: str


class _LimitExceeded(Exception):
    def __init__(self, limit: str, why: str) -> None:
        super().__init__(why)
        self.limit = limit


class _Stopped(Exception):
    """The parent wants the program to end, or is gone."""


def main(argv: Sequence[str]) -> None:
    order: Launch = json.loads(argv[1])
    control = socket.socket(fileno=os.dup(order["control"]))  # a low descriptor that is not inheritable
    os.close(order["control"])
    namespaces.adopt_orphans()
    output_fd, program_output = os.pipe()
    program = _start(order, control, output_fd, program_output)
    os.close(program_output)
    ended = _Guard(order, control, program, output_fd).watch()
    with suppress(OSError):
        control.sendall(_line(ended))
    os._exit(0)


def _line(message: Began | Ended) -> bytes:
    return json.dumps(message).encode() + b"\n"


# --- start ------------------------------------------------------------------------------------------------------------


def _start(order: Launch, control: socket.socket, output_fd: int, program_output: int) -> int:
    """Fork the program's process. Returns its id once it has dropped its privileges."""
    guard = os.getpid()
    here, there = socket.socketpair()
    program = os.fork()
    if program == 0:
        here.close()
        os.close(output_fd)
        _become(order, control, there, program_output, guard)
    there.close()
    with here:
        if here.recv(1):
            namespaces.map_own_ids(program)
            with suppress(OSError):
                here.sendall(b".")
    for fd in _passed_on():
        os.close(fd)
    return program


def _become(order: Launch, control: socket.socket, guard: socket.socket, program_output: int, parent: int) -> NoReturn:
    """Drop privileges and run the program; called in the new process."""
    status = 1
    try:
        os.setsid()
        os.dup2(program_output, 1)
        os.dup2(program_output, 2)
        os.close(program_output)

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
    """Return the file descriptors that only the program needs."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd" if namespaces.LINUX else "/dev/fd")):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return found


# --- monitor ----------------------------------------------------------------------------------------------------------


class _Guard:
    def __init__(self, order: Launch, control: socket.socket, program: int, output_fd: int) -> None:
        self.order, self.control, self.program, self.output_fd = order, control, program, output_fd
        self.status: int | None = None
        self.pending = b""
        """output of the program that is not forwarded yet"""
        self.second, self.printed = time.monotonic(), 0
        os.set_blocking(output_fd, False)

    def watch(self) -> Ended:
        """Monitor the program until it ends or must be ended. When this returns, no process of it is left."""
        broke = why = ""
        try:
            self._watch()
        except _LimitExceeded as passed:
            broke, why = passed.limit, str(passed)
        except _Stopped:
            pass
        gone = self._kill()
        self._flush_output()
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
        sources = [self.output_fd]
        while not self._reap():
            listen: list[Any] = [self.control, wake, *(sources if not self.pending else [])]
            ready, writable, _ = select.select(listen, [2] if self.pending else [], [], TICK)
            if self.control in ready and not self.control.recv(_PIPE):
                raise _Stopped
            if wake in ready:
                os.read(wake, _PIPE)
            if self.output_fd in ready and not self._listen():
                sources = []
            if writable:
                self._pass_on()
            if (now := time.monotonic()) - looked >= TICK:
                looked = now
                self._check_limits()

    def _reap(self) -> bool:
        """Reap ended processes, and return whether the program has ended."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.program:
                    self.status = status
        return self.status is not None

    def _check_limits(self) -> None:
        if os.getppid() != self.order["parent"]:
            raise _Stopped
        resident = {pid: pages for pid in descendants(os.getpid()) if (pages := _resident(pid))}
        if len(resident) > self.order["processes"]:
            raise _LimitExceeded(
                "processes", f"it ran {len(resident)} processes, the limit is {self.order['processes']}"
            )
        if sum(resident.values()) > self.order["memory"]:
            # count shared pages once, which takes longer
            held = sum(resident.values()) if len(resident) == 1 else sum(map(_proportional, resident))
            if held > self.order["memory"]:
                raise _LimitExceeded(
                    "memory", f"it held {_giga(held)} GB of memory, the limit is {_giga(self.order['memory'])}"
                )

    def _listen(self) -> bool:
        """Read output of the program. Returns False at its end."""
        try:
            self.pending = os.read(self.output_fd, _PIPE)
        except BlockingIOError:
            return True
        if time.monotonic() - self.second >= 1:
            self.second, self.printed = time.monotonic(), 0
        self.printed += len(self.pending)
        if self.printed > self.order["output"]:
            why = f"it printed more than {self.order['output'] / 1e6:g} MB in a second, which is not allowed"
            raise _LimitExceeded("output", why)
        return bool(self.pending)

    def _pass_on(self) -> None:
        try:
            self.pending = self.pending[os.write(2, self.pending) :]
        except OSError:
            self.pending = b""  # the reader is gone

    def _flush_output(self) -> None:
        """Forward the remaining output, as far as this does not block."""
        with suppress(_LimitExceeded, OSError):
            while (self.pending or self._listen()) and select.select([], [2], [], 0)[1]:
                if not self.pending:
                    break
                self._pass_on()

    def _kill(self) -> bool:
        """Kill all processes, repeatedly, since they may start others meanwhile. Returns whether all are gone."""
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
    """Return what is not limited if the kernel does not list the children of a process."""
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return []
    return [
        "the kernel does not list the children of a process here: memory, processes and output of what a reward starts "
        "are not limited, and they are not killed with it"
    ]


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children, their children, and so on."""
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
    """Return the resident memory in bytes; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Return the proportional set size in bytes: shared pages are divided among the processes that share them."""
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
