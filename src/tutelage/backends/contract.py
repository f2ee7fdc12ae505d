"""What the training loop asks of the student, the teachers and the learner, wherever they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from tutelage.checkpoint.store import Best, Checkpoint, CheckpointStore
from tutelage.data.notes import Report
from tutelage.data.ragged import Ragged
from tutelage.engines.contract import GenerateRequest, Generation
from tutelage.learner.schedule import Schedule
from tutelage.queue.contract import BatchRef
from tutelage.record.timeline import Interval
from tutelage.teachers.cache import CacheCounts

LearnResult = tuple[dict[str, float], dict[str, Ragged]]
"""Metrics of a step, and per-action columns of the rows that are shown."""


class Backend(Protocol):
    """Runs the student, the teachers and the learner."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Start everything on entry and stop it on exit."""

    async def forget_prefixes(self) -> None:
        """Drop the prompt prefixes that engines cache. Otherwise the last bits of a step or an evaluation would depend
        on what ran before it, and a resumed run would differ."""

    async def learn(self, ref: BatchRef, rate: float, schedule: Schedule, shown: int) -> LearnResult:
        """Do the updates of one step. Raises NonFiniteLoss if a loss or gradient is not finite."""

    async def measure(self, ref: BatchRef, columns: Sequence[str]) -> dict[str, Ragged]:
        """Compute columns of the student on rows of the queue, to compare with those of the teacher."""

    async def publish(self, version: int) -> None:
        """Load the learner's weights into the student engines; returns when all of them have the weights."""

    def averaged(self, version: int) -> AbstractAsyncContextManager[None]:
        """While entered, student engines have the running mean of the weights, if the recipe keeps one; `version` is
        their current version."""

    async def write(self, teacher: str, request: GenerateRequest) -> Generation:
        """Let a teacher continue a text."""

    async def seconds(self) -> tuple[float, float]:
        """Return the seconds that all engines spent on generation and on scoring since the last call."""

    async def caches(self) -> CacheCounts:
        """Return what the score caches of all teachers did since the last call."""

    async def timeline(self) -> list[Interval]:
        """Return which engine served which request when, since the last call; empty where engines take turns."""

    async def counts(self) -> dict[str, Any]:
        """Return the counts of rewards and teachers for the summary of the run."""

    async def save(self, store: CheckpointStore, step: int, state: Mapping[str, Any], mark: Best | None) -> Path:
        """Write a checkpoint of everything that learns and of the run's own state; `mark` makes it the best one."""

    async def restore(self, path: Path) -> Checkpoint:
        """Load a checkpoint into the learner, and return it for the run's own state."""


def report_gaps(gaps: Iterable[str], report: Report) -> None:
    """Report, once each, what the kernel does not isolate the reward processes from."""
    for gap in dict.fromkeys(gaps):
        report(f"rewards: {gap}")
