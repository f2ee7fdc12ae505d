"""Engines that compute in this process: requests wait in order, and the scheduler decides when to compute.

Nothing here looks at the clock, except to count seconds: the same requests give the same batches.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from tutelage.data.trajectory import Key
from tutelage.engines.contract import Engine, EngineError, Scores


class _Scored(Protocol):
    @property
    def key(self) -> Key: ...


W = TypeVar("W")
"""What waits to be generated."""
S = TypeVar("S", bound=_Scored)
"""The score requests that the engine takes."""
T = TypeVar("T")


class EmbeddedEngine(Engine, Generic[W, S]):
    """An engine that `InlineScheduler` drives. Where `tick` or `score_batch` raises, everyone who waits for the engine
    has been told."""

    def __init__(self, *, shares_weights: bool, batch_size: int) -> None:
        """`batch_size` bounds a scoring batch, in units of `_size`; a larger request is a batch of its own."""
        self.shares_weights, self._batch_size = shares_weights, batch_size
        self.version = 0
        self.on_work: Callable[[], None] = lambda: None
        """called when a request arrives"""
        self._order = itertools.count()
        self._waiting: list[tuple[tuple[object, ...], int, W]] = []
        self._scores: list[tuple[tuple[object, ...], int, S, asyncio.Future[Scores]]] = []

    # ── what the scheduler calls ─────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def writing(self) -> int:
        """Generate requests that wait or are under way."""

    @property
    def generating(self) -> bool:
        return self.writing > 0

    @property
    def scoring(self) -> int:
        """Score requests that wait."""
        return len(self._scores)

    @property
    def in_flight(self) -> int:
        return self.writing + self.scoring

    @torch.no_grad()
    def tick(self) -> None:
        """Admit what fits and take one step of everything under way."""
        started = time.perf_counter()
        try:
            self._tick()
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self.counts.generate_seconds += time.perf_counter() - started

    @torch.no_grad()
    def score_batch(self) -> None:
        """Compute the score requests that come first, as one batch."""
        batch: list[tuple[S, asyncio.Future[Scores]]] = []
        size = 0
        while self._scores:
            following = self._scores[0][2]
            if batch and (size + self._size(following) > self._batch_size or not self._joins(batch[0][0], following)):
                break
            _, _, request, future = heapq.heappop(self._scores)
            size += self._size(request)
            batch.append((request, future))
        if not batch:
            return
        started = time.perf_counter()
        try:
            results = self._score([request for request, _ in batch])
        except Exception as error:
            for _, future in batch:
                refuse(future, "scoring failed", error)
            self._fail(error)
            raise
        finally:
            self.counts.score_seconds += time.perf_counter() - started
        for (_, future), scores in zip(batch, results, strict=True):
            resolve(future, scores)

    # ── what an engine adds ──────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _tick(self) -> None:
        """Admit what fits and take one step of everything under way."""

    @abstractmethod
    def _score(self, requests: Sequence[S]) -> Sequence[Scores]:
        """Compute one batch."""

    @abstractmethod
    def _size(self, request: S) -> int:
        """The share of `batch_size` that a request takes."""

    def _joins(self, first: S, request: S) -> bool:
        """Whether a request can be computed in the same batch as `first`."""
        return True

    @abstractmethod
    def _take_under_way(self) -> list[asyncio.Future[Any]]:
        """Forget every generation that waits or is under way, and return the futures of those who wait for them."""

    # ── shared by engines ────────────────────────────────────────────────────────────────────────────────────────

    def _wait(self, order: tuple[object, ...], waiting: W) -> None:
        """Queue a generation."""
        heapq.heappush(self._waiting, (order, next(self._order), waiting))
        self.on_work()

    async def _scored(self, request: S) -> Scores:
        """Queue a score request and wait for its answer."""
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._scores, (tuple(request.key), next(self._order), request, future))
        self.on_work()
        return await future

    def _fail(self, error: Exception) -> None:
        """An error inside the model reaches everyone who waits, instead of leaving them to wait for ever."""
        for future in self._take_under_way():
            refuse(future, "generation failed", error)
        scores, self._scores = self._scores, []
        for _, _, _, waiting in scores:
            refuse(waiting, "scoring failed", error)


def resolve(future: asyncio.Future[T], value: T) -> None:
    """Answer, unless nobody waits any more."""
    if not future.done():
        future.set_result(value)


def refuse(future: asyncio.Future[Any], what: str, error: Exception) -> None:
    """Fail with the reason, unless nobody waits any more."""
    if future.done():
        return
    failure = EngineError(f"{what}: {error}")
    failure.__cause__ = error
    future.set_exception(failure)
