"""Kills parts of a run on Ray from beside it, each while it has something to do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tutelage.backends.ray.actors import Actor, EngineActor
from tutelage.backends.ray.backend import RayBackend
from tutelage.backends.ray.coordinator import Coordinator
from tutelage.backends.ray.handles import ActorHandle
from tutelage.record import RunDirectory

PATIENCE = 400.0
"""Seconds before a test gives up waiting for something to kill."""


class Assassin(threading.Thread):
    """Kills parts of a run from beside it, in turn, each when it has something to do."""

    def __init__(self, *plots: Callable[[RayBackend, RunDirectory], bool]) -> None:
        super().__init__(daemon=True)
        self.plots = list(plots)
        self.done: list[str] = []
        self.found: RayBackend | None = None
        self.directory: RunDirectory | None = None
        self.error: BaseException | None = None
        self.ended = 0.0
        """when all was done"""

    def join_next_run(self, run: Path, patch: pytest.MonkeyPatch) -> None:
        """Start when the next run, whose directory is `run`, is ready."""
        ready = RayBackend._ready

        async def watched(backend: RayBackend) -> None:
            await ready(backend)
            self.found, self.directory = backend, RunDirectory(run)

        patch.setattr(RayBackend, "_ready", watched)
        self.start()

    def run(self) -> None:
        try:
            ends = time.monotonic() + PATIENCE
            for plot in self.plots:
                while self.found is None or self.directory is None or not plot(self.found, self.directory):
                    if time.monotonic() > ends:
                        raise TimeoutError(f"{plot.__name__}: nothing to kill")
                    time.sleep(0.01)
                self.done.append(plot.__name__)
            self.ended = time.monotonic()
        except BaseException as error:
            self.error = error


def steps_of(directory: RunDirectory) -> int:
    return len(directory.load_metrics())


A = TypeVar("A", bound=Actor)


def kill(actor: ActorHandle[A], busy: Callable[[A], Coroutine[Any, Any, int]]) -> bool:
    """SIGKILL, if it has something in flight."""
    if actor.call_sync(busy) < 1:
        return False
    os.kill(actor.call_sync(Actor.pid), signal.SIGKILL)
    return True


def kill_serving(run: RayBackend, replica: ActorHandle[EngineActor], balancer: str) -> bool:
    """SIGKILL to the first replica of a load balancer, if it has a request in flight."""
    pid = replica.call_sync(Actor.pid)
    if run.coordinator.call_sync(Coordinator.in_flight)[balancer][0] < 1:
        return False
    os.kill(pid, signal.SIGKILL)
    return True
