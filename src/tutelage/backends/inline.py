"""The backend that runs everything in this process; and what a checkpoint of a learner holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.backends.contract import LearnResult, report_gaps
from tutelage.checkpoint.optimizer_state import pack_optimizer, pack_rng, unpack_optimizer, unpack_rng
from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import Best, Checkpoint, CheckpointStore
from tutelage.data.notes import Report
from tutelage.data.ragged import Ragged
from tutelage.engines.contract import Engine, GenerateRequest, Generation
from tutelage.engines.scheduler import InlineScheduler
from tutelage.learner.ranks import alone
from tutelage.learner.schedule import Schedule
from tutelage.learner.step import Learner, Trainable
from tutelage.models.loading import whole_weights
from tutelage.models.weights import copy_named
from tutelage.queue.contract import BatchRef
from tutelage.record.timeline import Interval
from tutelage.rewards.processes.pool import RewardPool
from tutelage.teachers.cache import CacheCounts, CachedScorer
from tutelage.teachers.pool import Scorer


@dataclass(slots=True)
class InlineBackend:
    """Student, teachers and learner in this process."""

    learner: Learner
    student: Engine
    teachers: Mapping[str, Engine]
    reference: Engine | None
    rewards: RewardPool | None
    score_every: int
    report: Report
    caching: Mapping[str, CachedScorer]
    """the teachers whose scores are cached"""

    @property
    def engines(self) -> list[Engine]:
        reference = [self.reference] if self.reference is not None else []
        return [self.student, *self.teachers.values(), *reference]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                await stack.enter_async_context(engine.running())
            await stack.enter_async_context(InlineScheduler(self.engines, self.score_every))
            try:
                if self.rewards is not None:
                    await self.rewards.start()
                    report_gaps(self.rewards.gaps, self.report)
                yield
            finally:
                if self.rewards is not None:
                    await self.rewards.close()

    async def forget_prefixes(self) -> None:
        for engine in self.engines:
            await engine.load(engine.version, None)

    async def learn(self, ref: BatchRef, rate: float, schedule: Schedule, shown: int) -> LearnResult:
        await self.student.sleep()  # `publish` wakes it
        return await self.learner.learn(ref, rate, schedule, shown)

    async def measure(self, ref: BatchRef, columns: Sequence[str]) -> dict[str, Ragged]:
        return await self.learner.measure(ref, columns)

    async def publish(self, version: int) -> None:
        await self.student.load(version, None if self.student.shares_weights else self._weights())

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        """The student's weights as its engine takes them."""
        student = self.learner.student
        if "whole" in self.student.abilities.weights:
            return whole_weights(student.model.model).items()
        return student.weights

    @asynccontextmanager
    async def averaged(self, version: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self.learner.student.average:
                await self._swap(version)
                stack.push_async_callback(self._swap, version)
            yield

    async def _swap(self, version: int) -> None:
        """Exchange the weights and their running mean, also in an engine that has a copy of its own."""
        self.learner.student.swap()
        if not self.student.shares_weights:
            await self.publish(version)

    async def write(self, teacher: str, request: GenerateRequest) -> Generation:
        answer = await self.teachers[teacher].generate(request)
        assert isinstance(answer, Generation)
        return answer

    async def seconds(self) -> tuple[float, float]:
        return take_seconds(self.engines)

    async def caches(self) -> CacheCounts:
        return sum((scorer.recent() for scorer in self.caching.values()), CacheCounts())

    async def timeline(self) -> list[Interval]:
        return []

    async def counts(self) -> dict[str, Any]:
        return {
            "rewards": dict(self.rewards.counts) if self.rewards is not None else {},
            "teachers": {
                name: teacher_counts(engine, self.caching.get(name)) for name, engine in self.teachers.items()
            },
        }

    async def save(self, store: CheckpointStore, step: int, state: Mapping[str, Any], mark: Best | None) -> Path:
        tensors, own = learner_state(self.learner)
        seen = mark or Best(step)
        return store.save(
            step, tensors, {**state, **own}, best=mark is not None, measure=seen.measure, value=seen.value
        )

    async def restore(self, path: Path) -> Checkpoint:
        found = load_shards(path, {}, alone)
        restore_learner(self.learner, found)
        return found


def teacher_counts(engine: Engine, scorer: Scorer | None) -> dict[str, Any]:
    """Return what an engine has done, and the cache in front of it if there is one."""
    cache = {"cache": asdict(scorer.cache.counts)} if isinstance(scorer, CachedScorer) else {}
    return {**asdict(engine.counts), **cache}


def take_seconds(engines: Sequence[Engine]) -> tuple[float, float]:
    """Return the seconds that engines spent on generation and on scoring, and reset them."""
    generate = sum(engine.counts.generate_seconds for engine in engines)
    score = sum(engine.counts.score_seconds for engine in engines)
    for engine in engines:
        engine.counts.generate_seconds = engine.counts.score_seconds = 0.0
    return generate, score


def learner_state(learner: Learner) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Collect everything that a rank needs to resume: tensors by file and name, and plain values."""
    rng, rng_state = pack_rng()
    tensors: dict[str, dict[str, Tensor]] = {"rng": rng}
    state: dict[str, Any] = {"rng": rng_state, "threads": torch.get_num_threads()}
    state["dtype"] = str(learner.dtype).removeprefix("torch.")
    for name, trainable in _trainables(learner).items():
        tensors[f"{name}optimizer"], state[f"{name}optimizer"] = pack_optimizer(trainable.optimizer, trainable.named)
        tensors[name.rstrip("_") or "model"] = {key: p.detach() for key, p in trainable.named}
    if learner.student.average:
        tensors["average"] = learner.student.average
    return tensors, state


def restore_learner(learner: Learner, found: Checkpoint) -> None:
    """Load weights, optimizer state, running mean and random state of a checkpoint into a learner."""
    for name, trainable in _trainables(learner).items():
        copy_named(trainable.named, found.tensors[name.rstrip("_") or "model"])
        trainable.round_weights()
        key = f"{name}optimizer"
        unpack_optimizer(trainable.optimizer, list(trainable.named), found.tensors[key], found.state[key])
    for name, kept in learner.student.average.items():
        kept.copy_(found.tensors["average"][name])
    unpack_rng(found.tensors["rng"], found.state["rng"])


def _trainables(learner: Learner) -> dict[str, Trainable]:
    """Return the trainables of a checkpoint by the prefix of their names."""
    critic = {"critic_": learner.critic} if learner.critic is not None else {}
    return {"": learner.student, **critic}
