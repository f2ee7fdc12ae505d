"""A run on a Ray cluster: the same loop, with everything behind it in processes of their own.

driver ──order, prompts──► agent-loop workers ──► student engines       the driver sees prompts, metadata, metrics
   │                            │         └─────► teachers, reference   tensors go from workers to the queue, from
   │                            └─rows──► queue ──rows──► learner ranks  the queue to ranks, from ranks to engines
   └──references──────────────────────────────────────────► │
                                  student engines ◄──weights─┘
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutelage.backends.contract import LearnResult, report_gaps
from tutelage.backends.ray.actors import (
    EngineActor,
    Engines,
    LearnerActor,
    Report,
    RolloutActor,
    Setting,
    pools,
)
from tutelage.backends.ray.cluster import Cluster, Remote, Stored, all_within, needing
from tutelage.backends.ray.coordinator import COORDINATOR, Coordinator, Started, ask_coordinator, desks
from tutelage.checkpoint.store import Best, Checkpoint, CheckpointStore
from tutelage.config.pools import pool_members
from tutelage.config.schema import RunConfig
from tutelage.data.notes import Report as Say
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import GroupKey, Prompt
from tutelage.engines.contract import GenerateRequest, Generation
from tutelage.errors import ReplicaGone, UserError
from tutelage.learner.packing import deal, in_order
from tutelage.learner.schedule import Schedule
from tutelage.modality import text as build
from tutelage.modality.dispatch import Role
from tutelage.queue.contract import BatchRef
from tutelage.queue.transfer_queue import TransferSampleQueue
from tutelage.queue.transfer_queue import start as start_queue
from tutelage.record.timeline import Interval
from tutelage.rollout.runner import EpisodeDone, RolloutRequest
from tutelage.rollout.worker import EpisodeFailure
from tutelage.routing.shared import REFERENCE, STUDENT, of_teacher
from tutelage.teachers.pool import TeacherPool

DRIVER = "driver"
WINDOW = 0.005
"""Seconds in which writes of one process to the queue may join."""
NO_QUEUE = "Rows of the step under way are lost with it, so the run cannot go on."


@dataclass(slots=True)
class RayRollout:
    """Deals prompts to agent-loop workers; those of a worker that dies are run again by the others."""

    workers: tuple[Remote, ...]
    coordinator: Remote
    reissued: int = 0
    """prompts that were run again because their worker died"""
    _number: int = 0

    async def run(
        self, order: RolloutRequest, prompts: Sequence[Prompt]
    ) -> AsyncIterator[EpisodeDone | EpisodeFailure]:
        outcomes: asyncio.Queue[EpisodeDone | EpisodeFailure | BaseException | None] = asyncio.Queue()

        async def work() -> None:
            try:
                await self._all(order, prompts, outcomes)
            except BaseException as error:
                outcomes.put_nowait(error)
            else:
                outcomes.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            while (outcome := await outcomes.get()) is not None:
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _all(self, order: RolloutRequest, prompts: Sequence[Prompt], outcomes: asyncio.Queue[Any]) -> None:
        """Every prompt, by whichever workers are there."""
        left = list(prompts)
        while left:
            shares = [left[number :: len(self.workers)] for number in range(len(self.workers))]
            work = [self._share(w, order, s, outcomes) for w, s in zip(self.workers, shares, strict=True) if s]
            found = await asyncio.gather(*work)
            lost = [prompt for unfinished, _ in found for prompt in unfinished]
            gone = [error for _, error in found if error is not None]
            if lost and len(gone) == len(found) and all(error.for_good for error in gone):
                raise UserError(f"all agent-loop workers are gone: {gone[0]}")
            if lost and gone:
                await asyncio.sleep(0.2)
            self.reissued += len(lost)
            left, order = lost, order.again()

    async def _share(
        self, worker: Remote, order: RolloutRequest, prompts: list[Prompt], outcomes: asyncio.Queue[Any]
    ) -> tuple[list[Prompt], ReplicaGone | None]:
        """The prompts that a worker did not finish, and why."""
        self._number += 1
        number = self._number
        finished: Counter[GroupKey] = Counter()
        try:
            await worker.call("start", number, order, prompts)
            over = False
            while not over:
                report: Report = await worker.call("report", number)
                for outcome in report.outcomes:
                    finished[outcome.key.group] += 1
                    outcomes.put_nowait(outcome)
                if report.mistake is not None:
                    raise report.mistake
                if report.error is not None:
                    raise RuntimeError(f"{worker.name}: {report.error}")
                over = report.over
        except ReplicaGone as error:
            if error.for_good:
                await ask_coordinator(self.coordinator, "leave", worker.name)
            return [p for p in prompts if finished[GroupKey(order.partition, p.uid)] < order.samples], error
        return [], None


@dataclass(slots=True)
class RayBackend:
    """Student, teachers and learner in processes of their own."""

    config: RunConfig
    cluster: Cluster
    coordinator: Remote
    engines: Engines
    ranks: tuple[Remote, ...]
    workers: tuple[Remote, ...]
    queue: TransferSampleQueue
    rollout: RayRollout
    say: Say

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        processes = [Remote(name, actor) for name, actor in self.queue.actors.items()]
        try:
            await self._ready()
            found = await asyncio.gather(*(self._if_there(worker, "gaps") for worker in self.workers))
            report_gaps([gap for gaps in found for gap in gaps or ()], self.say)
            async with needing(processes, self.config.ray.request_deadline, self.queue.release, NO_QUEUE):
                yield
        finally:
            self.close()

    async def _ready(self) -> None:
        """Everything loads at the same time."""
        deadline = self.config.ray.request_deadline
        try:
            address = await self.ranks[0].call("address")
            ready = {remote.name: remote.call("ready") for remote in (*self.engines.all(), *self.workers)}
            ready |= {rank.name: rank.call("ready", address) for rank in self.ranks}
            await all_within(ready, deadline, "starting")
        except ReplicaGone as error:
            raise UserError(f"the run cannot start: {error}") from error

    def close(self) -> None:
        try:
            self.queue.close()
        finally:
            self.cluster.close()

    async def forget_prefixes(self) -> None:
        await asyncio.gather(*(self._if_there(engine, "forget") for engine in self.engines.all()))

    async def learn(self, ref: BatchRef, rate: float, schedule: Schedule, shown: int) -> LearnResult:
        found: list[LearnResult] = await self._ranks("learn", ref, rate, schedule, shown)
        hands = [[row for row in hand if row < shown] for hand in self._hands(ref)]
        return found[0][0], in_order([(hand, part[1]) for hand, part in zip(hands, found, strict=True)])

    async def measure(self, ref: BatchRef, columns: Sequence[str]) -> dict[str, Ragged]:
        found = await self._ranks("measure", ref, columns)
        return in_order(list(zip(self._hands(ref), found, strict=True)))

    def _hands(self, ref: BatchRef) -> list[list[int]]:
        """The rows of each rank."""
        return deal([int(ref.tags[key]["tokens"]) for key in ref.keys], len(self.ranks))

    async def publish(self, version: int) -> None:
        buckets = (await self._ranks("weights"))[0]
        await ask_coordinator(self.coordinator, "publish", version, buckets)
        deadline = self.config.ray.publish_deadline
        loads = {engine.name: self._load(engine, version, buckets) for engine in self.engines.student}
        await all_within(loads, deadline, f"publishing version {version}")

    async def _load(self, engine: Remote, version: int, buckets: list[Any]) -> None:
        """An engine that is being started again asks the coordinator for the version; one that is gone for good is not
        missed as long as there are others."""
        try:
            await engine.call("load", version, buckets)
        except ReplicaGone as error:
            if error.for_good and len(self.engines.student) == 1:
                raise

    @asynccontextmanager
    async def averaged(self, version: int) -> AsyncIterator[None]:
        if not all(await self._ranks("swap")):
            yield
            return
        try:
            await self.publish(version)
            yield
        finally:
            await self._ranks("swap")
            await self.publish(version)

    async def write(self, teacher: str, request: GenerateRequest) -> Generation:
        answer: Generation = await self.engines.teachers[teacher][0].call("generate", request)
        return answer

    async def seconds(self) -> tuple[float, float]:
        found = await asyncio.gather(*(self._if_there(engine, "seconds") for engine in self.engines.all()))
        return sum(pair[0] for pair in found if pair), sum(pair[1] for pair in found if pair)

    async def timeline(self) -> list[Interval]:
        found = await asyncio.gather(*(self._if_there(engine, "intervals") for engine in self.engines.all()))
        return sorted((interval for kept in found for interval in kept or ()), key=lambda i: (i.start, i.end))

    async def counts(self) -> dict[str, Any]:
        workers = [c for c in await asyncio.gather(*(self._if_there(w, "counts") for w in self.workers)) if c]
        starts: list[Started] = await ask_coordinator(self.coordinator, "starts")
        processes: dict[str, list[dict[str, Any]]] = {}
        for start in starts:
            processes.setdefault(start.name, []).append({"actor": start.actor, "pid": start.pid})
        teachers = {
            name: await asyncio.gather(*(self._if_there(replica, "counts") for replica in replicas))
            for name, replicas in self.engines.teachers.items()
        }
        return {
            "rewards": dict(sum((Counter(c["rewards"]) for c in workers), Counter())),
            "teachers": {name: [c for c in found if c] for name, found in teachers.items()},
            "retries": dict(sum((Counter(c["retries"]) for c in workers), Counter())),
            "restarts": {name: len(found) - 1 for name, found in processes.items() if len(found) > 1},
            "processes": processes,
            "reissued_prompts": self.rollout.reissued,
        }

    async def save(self, store: CheckpointStore, step: int, state: Mapping[str, Any], mark: Best | None) -> Path:
        found: list[Path] = await self._ranks("save", store.directory.absolute(), store.keep, step, dict(state), mark)
        return found[0]

    async def restore(self, path: Path) -> Checkpoint:
        found: list[Checkpoint] = await self._ranks("restore", path.absolute())
        return found[0]

    async def _ranks(self, method: str, *args: Any) -> list[Any]:
        """All ranks at once: they compute together, so one that is gone ends the run."""
        tasks = [asyncio.create_task(rank.call(method, *args)) for rank in self.ranks]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception()) is not None]
        for task in waiting:
            task.cancel()
        gone = [error for error in errors if isinstance(error, ReplicaGone)]
        if gone or (errors and len(errors) < len(tasks)):
            await asyncio.sleep(0.5)  # who died first is known a moment later than that the others lost it
            dead = [rank.name for rank in self.ranks if await self._if_there(rank, "pid") is None]
            names = ", ".join(dead) or "a rank of the learner"
            raise UserError(
                f"{names} died while it was asked to {method}: {gone[0] if gone else errors[0]}\n"
                "The learner's ranks hold the weights together, so the run cannot go on without it; "
                "`tutelage resume` goes on from the last checkpoint."
            ) from errors[0]
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]

    async def _if_there(self, remote: Remote, method: str) -> Any:
        """Its answer; None from one that is gone."""
        try:
            return await asyncio.wait_for(remote.call(method), self.config.ray.request_deadline)
        except (ReplicaGone, TimeoutError):
            return None


def start(config: RunConfig, vocabulary: int, report: Say) -> tuple[RayBackend, dict[str, TeacherPool]]:
    """Take places on a cluster and start every process; also the teachers, as this process asks them."""
    cluster = Cluster(config.ray, config.pools)
    try:
        backend = _spawn(config, cluster, vocabulary, report)
        return backend, pools(config, backend.engines, desks(backend.coordinator, DRIVER))
    except BaseException:
        cluster.close()
        raise


def _spawn(config: RunConfig, cluster: Cluster, vocabulary: int, report: Say) -> RayBackend:
    queue = start_queue(window=WINDOW, deadline=config.ray.deadline)
    coordinator = cluster.spawn(Coordinator, COORDINATOR, None, 0, _replicas(config), config.ray.queue)
    homes = Counter(member.pool for member in pool_members(config))

    def replicas(role: Role, teacher: str, title: str, pool: str) -> tuple[Remote, ...]:
        return tuple(
            cluster.spawn(
                EngineActor,
                f"{title}, replica {number}",
                pool,
                number,
                Setting(config, vocabulary, pool),
                role,
                teacher,
                f"{title}, replica {number}",
                share=1 / homes[pool],
                restarts=config.ray.restarts,
            )
            for number in range(config.pools[pool].replicas)
        )

    engines = Engines(
        replicas("student", "", "student", config.engine.pool),
        {
            name: replicas("teacher", name, f"teacher {name!r}", settings.pool or name)
            for name, settings in config.teachers.items()
        },
        replicas("reference", "", "reference", _reference_pool(config)) if build.has_reference(config) else (),
    )
    coordinator.ask("introduce", Stored.put((queue, engines)))
    home, count = config.learner.pool, config.pools[config.learner.pool].replicas
    ranks = tuple(
        cluster.spawn(
            LearnerActor,
            f"rank {rank} of the learner",
            home,
            rank,
            Setting(config, vocabulary, home),
            rank,
            count,
            share=1 / homes[home],
        )
        for rank in range(count)
    )
    place = config.rollout.pool
    workers = tuple(
        cluster.spawn(
            RolloutActor,
            f"agent-loop worker {number}",
            place,
            number,
            Setting(config, vocabulary, place),
            f"agent-loop worker {number}",
            share=1 / homes[place],
            restarts=config.ray.restarts,
        )
        for number in range(config.pools[place].replicas)
    )
    return RayBackend(
        config, cluster, coordinator, engines, ranks, workers, queue, RayRollout(workers, coordinator), report
    )


def _replicas(config: RunConfig) -> dict[str, int]:
    """By the name of their desk."""
    homes = {STUDENT: config.engine.pool}
    homes |= {of_teacher(name): settings.pool or name for name, settings in config.teachers.items()}
    if build.has_reference(config):
        homes[REFERENCE] = _reference_pool(config)
    return {name: config.pools[pool].replicas for name, pool in homes.items()}


def _reference_pool(config: RunConfig) -> str:
    return next(member.pool for member in pool_members(config) if member.name == "reference")
