"""Ctrl-C as a wish, not an accident."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """While entered, the first Ctrl-C calls `stop`; a second one interrupts at once. Needs a running event loop."""

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
