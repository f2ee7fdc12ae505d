"""Running vLLM engines for tests. A start takes many seconds, so tests share engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from tutelage.engines.registry import TextSpec
from tutelage.engines.vllm.engine import VllmEngine
from tutelage.models.causal_lm import CausalLM

T = TypeVar("T")
HANGS = 300.0
"""Seconds after which a test that waits for ever is stopped; a start of vLLM is slow on a busy machine."""


def student_spec(model: PreTrainedModel, path: Path, **options: Any) -> TextSpec:
    """The spec of a student's engine, which gets its weights as tensors."""
    usual: dict[str, Any] = {"vocabulary": model.config.vocab_size, "context": 256, "slots": 3, "batch_tokens": 512}
    return TextSpec(role="student", path=str(path), device="cpu", load=lambda: CausalLM(model), **{**usual, **options})


def teacher_spec(path: Path | str, vocabulary: int, **options: Any) -> TextSpec:
    """The spec of a teacher's engine, which reads its files."""

    def load() -> CausalLM:
        raise AssertionError("a teacher's model is not loaded into this process")

    usual: dict[str, Any] = {"context": 256, "batch_tokens": 512, "dtype": "float32"}
    return TextSpec(
        role="teacher", path=str(path), device="cpu", load=load, vocabulary=vocabulary, **{**usual, **options}
    )


class Served:
    """An engine that runs on an event loop of its own, so that tests that are not coroutines can share it."""

    def __init__(self, spec: TextSpec) -> None:
        self.engine = VllmEngine(spec)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._running = self.engine.running()

    def start(self) -> Served:
        try:
            self.call(self._running.__aenter__())
        except BaseException:
            self._end_loop()
            raise
        return self

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(HANGS):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    def do(self, work: Callable[[VllmEngine], Awaitable[T]]) -> T:
        async def done() -> T:
            return await work(self.engine)

        return self.call(done())

    def stop(self) -> None:
        try:
            self.call(self._running.__aexit__(None, None, None))
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
