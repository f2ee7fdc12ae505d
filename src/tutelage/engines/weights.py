"""Versioned publication of weights: every engine has the new version before the next step begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor


class Loads(Protocol):
    """The part of the engine contract that takes weights."""

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None: ...


async def publish(
    engines: Sequence[Loads], version: int, source: Callable[[], Iterable[tuple[str, Tensor]]] | None
) -> None:
    """Hand version `version` to all engines. `source` None: they share the learner's weights and only drop caches."""
    await asyncio.gather(*(engine.load(version, source() if source else None) for engine in engines))
