"""Everything in this process, on one thread, in an order that counts decide and the clock does not.

The scheduler lets all coroutines run until they wait for an engine, then computes one decode tick of every engine
that generates and, after every `score_every` ticks or when nothing is generated, one scoring batch of every engine
that has requests. So teachers score finished episodes while others are still being written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from tutelage.engines.contract import Engine
from tutelage.engines.embedded import EmbeddedEngine

SETTLE = 8
"""Turns of the event loop between computations: enough for a result to travel from an engine through loop, worker,
scoring and queue, and for the next request to arrive."""


class InlineScheduler:
    """Drives embedded engines from a task of the running event loop. Engines that compute elsewhere need no driver and
    are left alone."""

    def __init__(self, engines: Sequence[Engine], score_every: int) -> None:
        self.engines = [engine for engine in engines if isinstance(engine, EmbeddedEngine)]
        self.score_every = score_every
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        for engine in self.engines:
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
