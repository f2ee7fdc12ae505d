"""Everything in this process, on one thread, in an order that counts decide and the clock does not.

The scheduler lets all coroutines run until they wait for an engine, then computes one decode tick of every engine
that generates and, after every `score_every` ticks or when nothing is generated, one scoring batch of every engine
that has requests. So teachers score finished episodes while others are still being written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

SETTLE = 8
"""Turns of the event loop between computations: enough for a result to travel from an engine through loop, worker,
scoring and queue, and for the next request to arrive."""


class Steppable(Protocol):
    """The part of an embedded engine that the scheduler needs. Where `tick` or `score_batch` raises, everyone who waits
    for the engine has been told."""

    on_work: Callable[[], None]

    @property
    def generating(self) -> bool: ...

    @property
    def scoring(self) -> int: ...

    def tick(self) -> None: ...

    def score_batch(self) -> None: ...


class InlineScheduler:
    """Drives embedded engines from a task of the running event loop."""

    def __init__(self, engines: Sequence[Steppable], score_every: int) -> None:
        self.engines = engines
        self.score_every = score_every
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        for engine in engines:
            engine.on_work = self._work.set

    async def __aenter__(self) -> InlineScheduler:
        self._task = asyncio.create_task(self._run(), name="inline scheduler")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """An engine's error does not end this task: whoever waits for another engine, or asks again, would hang."""
        ticks = 0
        while True:
            for _ in range(SETTLE):
                await asyncio.sleep(0)
            generating = [engine for engine in self.engines if engine.generating]
            for engine in generating:
                with suppress(Exception):
                    engine.tick()
            ticks += bool(generating)
            if not generating or ticks % self.score_every == 0:
                for engine in self.engines:
                    if engine.scoring:
                        with suppress(Exception):
                            engine.score_batch()
            if not any(engine.generating or engine.scoring for engine in self.engines):
                ticks = 0  # counted from the last pause: where a process was resumed must not matter
                self._work.clear()
                await self._work.wait()
