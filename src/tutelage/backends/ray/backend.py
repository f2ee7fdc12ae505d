"""The backend that runs the parts of a run as actors on a Ray cluster.

driver ──request, prompts──► agent-loop workers ──► student engines     The driver sees prompts, metadata and metrics.
   │                              │         └─────► teachers, reference Tensors go from workers to the queue, from the
   │                              └─rows──► queue ──rows──► learner     queue to the learner's ranks, and from there to
   └──references──────────────────────────────────────────► │           the engines.
                                   student engines ◄──weights┘
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tutelage.backends.contract import LearnResult, report_gaps
from tutelage.backends.given import GivenCode
from tutelage.backends.placement import ProcessPlace, placement_lines
from tutelage.backends.ray.actors import (
    Actor,
    EngineActor,
    EngineHandles,
    LearnerActor,
    ProcessConfig,
    RolloutActor,
    teacher_pools,
)
from tutelage.backends.ray.cluster import ActorSpec, Cluster
from tutelage.backends.ray.coordinator import (
    COORDINATOR,
    Coordinator,
    WeightBucket,
    call_coordinator,
    connect_load_balancers,
)
from tutelage.backends.ray.faults import all_within, needing
from tutelage.backends.ray.handles import ActorHandle, Stored
from tutelage.backends.ray.rollout import RayRollout
from tutelage.checkpoint.store import Best, Checkpoint, CheckpointStore
from tutelage.config.engines import ENGINES
from tutelage.config.pools import pool_members
from tutelage.config.schema import RunConfig
from tutelage.data.notes import Report
from tutelage.data.ragged import Ragged
from tutelage.engines.contract import GenerateRequest, Generation
from tutelage.engines.registry import Role
from tutelage.errors import ReplicaGone, UserError
from tutelage.learner.packing import deal, in_order
from tutelage.learner.schedule import Schedule
from tutelage.modality import modality_of
from tutelage.queue.contract import BatchRef
from tutelage.queue.transfer_queue import TransferSampleQueue
from tutelage.queue.transfer_queue import start as start_queue
from tutelage.record.timeline import Interval
from tutelage.routing.shared import REFERENCE, STUDENT, teacher_balancer
from tutelage.teachers.cache import CacheCounts
from tutelage.teachers.pool import TeacherPool

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")

DRIVER = "driver"
"""Name of this process at the load balancers."""
WINDOW = 0.005
"""Seconds in which writes of one process to the queue are collected into one."""
NO_QUEUE = "Rows of the step under way are lost with it, so the run cannot go on."


@dataclass(slots=True)
class RayBackend:
    """Student, teachers and learner in processes of their own."""

    config: RunConfig
    cluster: Cluster
    coordinator: ActorHandle[Coordinator]
    engines: EngineHandles
    ranks: tuple[ActorHandle[LearnerActor], ...]
    workers: tuple[ActorHandle[RolloutActor], ...]
    queue: TransferSampleQueue
    rollout: RayRollout
    report: Report
    places: dict[str, ProcessPlace] = field(default_factory=dict)
    """where each process was when the run started, by its name"""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        processes: list[ActorHandle[Any]] = [ActorHandle(name, actor) for name, actor in self.queue.actors.items()]
        try:
            await self._ready()
            await self._report_places()
            found = await self._each(self.workers, RolloutActor.gaps)
            report_gaps([gap for gaps in found for gap in gaps], self.report)
            async with needing(processes, self.config.ray.request_deadline, self.queue.release, NO_QUEUE):
                yield
        finally:
            self.close()

    async def _ready(self) -> None:
        """Let all actors load at the same time, and wait for them."""
        deadline = self.config.ray.request_deadline
        try:
            address = await self.ranks[0].call(LearnerActor.address)
            ready = {engine.name: engine.call(EngineActor.ready) for engine in self.engines.all()}
            ready |= {worker.name: worker.call(RolloutActor.ready) for worker in self.workers}
            ready |= {rank.name: rank.call(LearnerActor.ready, address) for rank in self.ranks}
            await all_within(ready, deadline, "starting")
        except ReplicaGone as error:
            raise UserError(f"the run cannot start: {error}") from error

    async def _report_places(self) -> None:
        """Say on which node and devices the processes of each member are."""
        members: dict[str, Sequence[ActorHandle[Any]]] = {"student": self.engines.student}
        members |= {f"teacher {name}": replicas for name, replicas in self.engines.teachers.items()}
        members |= {"reference": self.engines.reference, "learner": self.ranks, "agent loops": self.workers}
        found: dict[str, list[ProcessPlace]] = {}
        for member, actors in members.items():
            for actor in actors:
                if (place := await self._if_there(actor, Actor.place)) is not None:
                    self.places[actor.name] = place
                    found.setdefault(member, []).append(place)
        for line in placement_lines(found):
            self.report(line)

    def close(self) -> None:
        try:
            self.queue.close()
        finally:
            self.cluster.close()

    async def forget_prefixes(self) -> None:
        await self._each(self.engines.all(), EngineActor.forget_prefixes)

    async def learn(self, ref: BatchRef, rate: float, schedule: Schedule, shown: int) -> LearnResult:
        if ENGINES[self.config.engine.kind].sleeps:
            await self._each(self.engines.student, EngineActor.sleep)  # `publish` wakes them
        found = await self._all_ranks(LearnerActor.learn, ref, rate, schedule, shown)
        hands = [[row for row in hand if row < shown] for hand in self._hands(ref)]
        return found[0][0], in_order([(hand, part[1]) for hand, part in zip(hands, found, strict=True)])

    async def measure(self, ref: BatchRef, columns: Sequence[str]) -> dict[str, Ragged]:
        found = await self._all_ranks(LearnerActor.measure, ref, columns)
        return in_order(list(zip(self._hands(ref), found, strict=True)))

    def _hands(self, ref: BatchRef) -> list[list[int]]:
        """Return the rows of each rank."""
        return deal([int(ref.tags[key]["tokens"]) for key in ref.keys], len(self.ranks))

    async def publish(self, version: int) -> None:
        buckets = (await self._all_ranks(LearnerActor.weights))[0]
        await call_coordinator(self.coordinator, Coordinator.publish, version, buckets)
        deadline = self.config.ray.publish_deadline
        loads = {engine.name: self._load(engine, version, buckets) for engine in self.engines.student}
        await all_within(loads, deadline, f"publishing version {version}")

    async def _load(self, engine: ActorHandle[EngineActor], version: int, buckets: list[WeightBucket]) -> None:
        """Load weights into an engine. One that is being restarted fetches them from the coordinator; one that is gone
        for good is an error only if there is no other."""
        try:
            await engine.call(EngineActor.load, version, buckets)
        except ReplicaGone as error:
            if error.for_good and len(self.engines.student) == 1:
                raise

    @asynccontextmanager
    async def averaged(self, version: int) -> AsyncIterator[None]:
        if not all(await self._all_ranks(LearnerActor.swap)):
            yield
            return
        try:
            await self.publish(version)
            yield
        finally:
            await self._all_ranks(LearnerActor.swap)
            await self.publish(version)

    async def write(self, teacher: str, request: GenerateRequest) -> Generation:
        answer = await self.engines.teachers[teacher][0].call(EngineActor.generate, request)
        assert isinstance(answer, Generation)
        return answer

    async def seconds(self) -> tuple[float, float]:
        found = await self._each(self.engines.all(), EngineActor.seconds)
        return sum(generate for generate, _ in found), sum(score for _, score in found)

    async def caches(self) -> CacheCounts:
        caching = [self.engines.teachers[name] for name, teacher in self.config.teachers.items() if teacher.cache]
        found = await self._each([replica for replicas in caching for replica in replicas], EngineActor.cache)
        return sum(found, CacheCounts())

    async def timeline(self) -> list[Interval]:
        found = await self._each(self.engines.all(), EngineActor.intervals)
        return sorted((interval for kept in found for interval in kept), key=lambda i: (i.start, i.end))

    async def counts(self) -> dict[str, Any]:
        workers = await self._each(self.workers, RolloutActor.counts)
        starts = await call_coordinator(self.coordinator, Coordinator.starts)
        processes: dict[str, list[dict[str, Any]]] = {}
        for start in starts:
            processes.setdefault(start.name, []).append({"actor": start.actor, "pid": start.pid})
        teachers = {
            name: await self._each(replicas, EngineActor.counts) for name, replicas in self.engines.teachers.items()
        }
        return {
            "rewards": dict(sum((Counter(c["rewards"]) for c in workers), Counter())),
            "teachers": teachers,
            "retries": dict(sum((Counter(c["retries"]) for c in workers), Counter())),
            "restarts": {name: len(found) - 1 for name, found in processes.items() if len(found) > 1},
            "processes": processes,
            "placement": {name: asdict(place) for name, place in self.places.items()},
            "reissued_prompts": self.rollout.reissued,
        }

    async def save(self, store: CheckpointStore, step: int, state: Mapping[str, Any], mark: Best | None) -> Path:
        directory = store.directory.absolute()
        return (await self._all_ranks(LearnerActor.save, directory, store.keep, step, dict(state), mark))[0]

    async def restore(self, path: Path) -> Checkpoint:
        return (await self._all_ranks(LearnerActor.restore, path.absolute()))[0]

    async def _all_ranks(
        self,
        method: Callable[Concatenate[LearnerActor, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call a method on all ranks at once. They compute together, so the loss of one is an error that ends the
        run."""
        tasks = [asyncio.create_task(rank.call(method, *args, **kwargs)) for rank in self.ranks]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception()) is not None]
        for task in waiting:
            task.cancel()
        gone = [error for error in errors if isinstance(error, ReplicaGone)]
        if gone or (errors and len(errors) < len(tasks)):
            await asyncio.sleep(0.5)  # Ray reports the dead rank a moment after the errors of the others
            dead = [rank.name for rank in self.ranks if await self._if_there(rank, Actor.pid) is None]
            names = ", ".join(dead) or "a rank of the learner"
            raise UserError(
                f"{names} died while it was asked to {method.__name__}: {gone[0] if gone else errors[0]}\n"
                "The learner's ranks hold the weights together, so the run cannot go on without it; "
                "`tutelage resume` goes on from the last checkpoint."
            ) from errors[0]
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]

    async def _each(self, actors: Sequence[ActorHandle[A]], method: Callable[[A], Coroutine[Any, Any, T]]) -> list[T]:
        """Call a method on several actors at once. Return the results of those that are there."""
        found = await asyncio.gather(*(self._if_there(actor, method) for actor in actors))
        return [result for result in found if result is not None]

    async def _if_there(self, actor: ActorHandle[A], method: Callable[[A], Coroutine[Any, Any, T]]) -> T | None:
        """Call a method; return None if the actor is gone."""
        try:
            return await asyncio.wait_for(actor.call(method), self.config.ray.request_deadline)
        except (ReplicaGone, TimeoutError):
            return None


def start(
    config: RunConfig, vocabulary: int, given: GivenCode, report: Report
) -> tuple[RayBackend, dict[str, TeacherPool]]:
    """Reserve devices on a cluster and start every process, which gets the `given` code. Return the backend, and the
    teachers for this process."""
    cluster = Cluster(config.ray, config.pools)
    try:
        backend = _spawn(config, cluster, vocabulary, given, report)
        balancers = connect_load_balancers(backend.coordinator, DRIVER)
        return backend, teacher_pools(config, backend.engines, balancers)
    except BaseException:
        cluster.close()
        raise


def _spawn(config: RunConfig, cluster: Cluster, vocabulary: int, given: GivenCode, report: Report) -> RayBackend:
    queue = start_queue(window=WINDOW, deadline=config.ray.deadline)
    coordinator = cluster.spawn(ActorSpec(COORDINATOR), Coordinator, _replicas(config), config.ray.queue)
    members = Counter(member.pool for member in pool_members(config))

    def spec(name: str, pool: str, replica: int, restarts: int) -> ActorSpec:
        return ActorSpec(name, pool, replica, share=1 / members[pool], restarts=restarts)

    def engine(role: Role, teacher: str, title: str, pool: str) -> tuple[ActorHandle[EngineActor], ...]:
        settings = ProcessConfig(config, vocabulary, pool, given)
        names = [f"{title}, replica {number}" for number in range(config.pools[pool].replicas)]
        return tuple(
            cluster.spawn(spec(name, pool, number, config.ray.restarts), EngineActor, settings, role, teacher, name)
            for number, name in enumerate(names)
        )

    engines = EngineHandles(
        engine("student", "", "student", config.engine.pool),
        {
            name: engine("teacher", name, f"teacher {name!r}", settings.pool or name)
            for name, settings in config.teachers.items()
        },
        engine("reference", "", "reference", _reference_pool(config)) if modality_of(config).has_reference else (),
    )
    coordinator.call_sync(Coordinator.register_handles, Stored.put((queue, engines)))
    pool = config.learner.pool
    settings, count = ProcessConfig(config, vocabulary, pool, given), config.pools[pool].replicas
    ranks = tuple(
        cluster.spawn(spec(f"rank {rank} of the learner", pool, rank, 0), LearnerActor, settings, rank, count)
        for rank in range(count)
    )
    pool = config.rollout.pool
    settings = ProcessConfig(config, vocabulary, pool, given)
    names = [f"agent-loop worker {number}" for number in range(config.pools[pool].replicas)]
    workers = tuple(
        cluster.spawn(spec(name, pool, number, config.ray.restarts), RolloutActor, settings, name)
        for number, name in enumerate(names)
    )
    rollout = RayRollout(workers, coordinator)
    return RayBackend(config, cluster, coordinator, engines, ranks, workers, queue, rollout, report)


def _replicas(config: RunConfig) -> dict[str, int]:
    """Return the numbers of replicas by the name of their load balancer."""
    pools = {STUDENT: config.engine.pool}
    pools |= {teacher_balancer(name): settings.pool or name for name, settings in config.teachers.items()}
    if modality_of(config).has_reference:
        pools[REFERENCE] = _reference_pool(config)
    return {name: config.pools[pool].replicas for name, pool in pools.items()}


def _reference_pool(config: RunConfig) -> str:
    return next(member.pool for member in pool_members(config) if member.name == "reference")
