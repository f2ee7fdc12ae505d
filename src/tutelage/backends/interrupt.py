"""Ctrl-C that stops a run in an orderly way, and runs inside an event loop that is running already."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T], stop: Callable[[], None] = lambda: None) -> T:
    """Like `asyncio.run`, but also works where an event loop is running already, as in a notebook: the work then runs
    in a loop in a thread of its own, and the calling thread waits. The first Ctrl-C calls `stop` in that loop; a second
    one cancels the work."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return _run_in_thread(work, stop)


def _run_in_thread(work: Coroutine[Any, Any, T], stop: Callable[[], None]) -> T:
    outcome: list[T] = []
    errors: list[BaseException] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def registered() -> None:
        task = asyncio.current_task()
        assert task is not None
        loops.append((asyncio.get_running_loop(), task))
        outcome.append(await work)

    def target() -> None:
        try:
            asyncio.run(registered())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=target, name="tutelage")
    with _first_interrupt(lambda: [loop.call_soon_threadsafe(stop) for loop, _ in loops]):
        thread.start()
        try:
            thread.join()
        except KeyboardInterrupt:
            for loop, task in loops:
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
            raise
    if errors:
        raise errors[0]
    return outcome[0]


@contextmanager
def _first_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """While entered, the first Ctrl-C calls `act` and the second raises KeyboardInterrupt, whatever handlers the
    running loop has installed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """While entered, the first Ctrl-C calls `stop`; a second one raises KeyboardInterrupt. Needs a running loop."""

    def first() -> None:
        stop()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, first)
    except (ValueError, RuntimeError):  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
