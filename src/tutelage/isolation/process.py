"""The parent's handle of an isolated process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tutelage.isolation.contract import Isolation
from tutelage.isolation.environment import clean_environment
from tutelage.isolation.guard import CLEANED, Began, Ended, Launch


class IsolatedProcess:
    """A running program and the guard that monitors it. Only `wait` and `end` block.

    process = IsolatedProcess.start(["-m", "my.module"], Isolation())
    ended = process.wait()
    """

    def __init__(self, guard: subprocess.Popen[bytes], control: socket.socket, scratch: str) -> None:
        self._guard = guard
        self._control = control
        self._scratch = scratch
        self._heard = b""

    @classmethod
    def start(
        cls,
        program: Sequence[str],
        isolation: Isolation,
        *,
        pass_fds: Sequence[int] = (),
        extra: Mapping[str, str] | None = None,
    ) -> IsolatedProcess:
        """Start a command, or with `-m` a module in the same Python.

        Its output goes to our standard error, its input is empty, and TMPDIR is a directory that is removed when it
        ends. `extra` holds additional environment variables. Raises UserError if a variable of `env` is not set.
        """
        environment = clean_environment(os.environ, isolation.env, network=isolation.network)
        ours, theirs = socket.socketpair()
        scratch = tempfile.mkdtemp(prefix="tutelage-")
        order: Launch = {
            "program": list(program),
            "control": theirs.fileno(),
            "parent": os.getpid(),
            "scratch": scratch,
            "network": isolation.network,
            "memory": isolation.memory,
            "processes": isolation.processes,
            "output": isolation.output,
        }
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": scratch}
        try:
            with theirs:
                guard = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tutelage.isolation.guard", json.dumps(order)],
                    env={**environment, **paths, **(extra or {})},
                    pass_fds=[theirs.fileno(), *pass_fds],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        ours.setblocking(False)
        return cls(guard, ours, scratch)

    @property
    def pid(self) -> int:
        """The process id of the guard. When the guard is gone, so is the program."""
        return self._guard.pid

    @property
    def gaps(self) -> list[str]:
        """What the kernel does not allow to isolate; known once the program has started."""
        began: Began | None = self._said("gaps")
        return began["gaps"] if began else []

    def kill(self) -> None:
        """Request that the program and all that it started are killed. Safe to repeat."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float | None = None) -> Ended:
        """Wait until no process of the program is left. Raises TimeoutError after `seconds`."""
        try:
            code = self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        ended: Ended | None = self._said("how")
        self._control.close()
        if ended is not None:
            return ended
        self._clean_up()
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return {"how": how, "broke": "", "why": ""}

    def end(self) -> Ended:
        """Kill the program and wait."""
        self.kill()
        try:
            return self.wait(2 * CLEANED)
        except TimeoutError:  # the guard itself was stopped
            self._guard.kill()
            return self.wait()

    def _clean_up(self) -> None:
        """Clean up after a guard that was killed. The program died with it; its process group is killed here."""
        began: Began | None = self._said("pid")
        if began is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(began["pid"], signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _said(self, key: str) -> Any:
        """Return the guard's message that has this key."""
        with suppress(OSError):
            while data := self._control.recv(65536):
                self._heard += data
        whole = self._heard[: self._heard.rfind(b"\n") + 1]
        return next((message for message in map(json.loads, whole.splitlines()) if key in message), None)
