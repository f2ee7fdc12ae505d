"""The actors of a run besides the coordinator: engines, agent-loop workers and ranks of the learner.

Each is an ordinary class made of the same parts as a run in one process. `backend` spawns them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tutelage.backends import process
from tutelage.backends.contract import LearnResult
from tutelage.backends.given import GivenCode
from tutelage.backends.inline import learner_state, restore_learner, take_seconds, teacher_counts
from tutelage.backends.placement import ProcessPlace
from tutelage.backends.ray.cluster import actor_id, gpu_ids, node_address
from tutelage.backends.ray.coordinator import (
    Coordinator,
    ProcessStart,
    WeightBucket,
    connect_load_balancers,
    find_coordinator,
)
from tutelage.backends.ray.handles import ActorHandle, Stored
from tutelage.checkpoint.optimizer_state import seed_rng
from tutelage.checkpoint.store import Best, Checkpoint
from tutelage.config.engines import ENGINES
from tutelage.config.schema import PoolSettings, RunConfig
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Prompt
from tutelage.engines.contract import AnyOutput, AnyRequest, AnyScoreRequest, Engine, Scores
from tutelage.engines.registry import Role
from tutelage.engines.scheduler import InlineScheduler
from tutelage.errors import ReplicaGone, UserError
from tutelage.learner.ranks import Ranks, alone
from tutelage.learner.schedule import Schedule
from tutelage.modality import modality_of
from tutelage.modality.contract import Spread
from tutelage.models.dtype import choose_dtype
from tutelage.models.loading import whole_weights
from tutelage.models.weights import with_tied_head
from tutelage.queue.contract import BatchRef, SampleQueue
from tutelage.record.timeline import Interval
from tutelage.rollout.judges import Judges, reward_pool
from tutelage.rollout.runner import EpisodeDone, Rollout, RolloutRequest
from tutelage.rollout.worker import EpisodeFailure
from tutelage.routing.load_balancer import LoadBalancer
from tutelage.routing.router import Router
from tutelage.routing.shared import REFERENCE, STUDENT, LoadBalancerClient, teacher_balancer
from tutelage.teachers.cache import CacheCounts, CachedScorer
from tutelage.teachers.pool import TeacherPool

COALESCED = 0.005
"""Seconds that a worker's report waits for further outcomes after the first."""
BUCKET = 256 * 1024 * 1024
"""Bytes at which a bucket of weights is closed and stored."""
INTERVALS = 20_000
"""Requests whose times an engine keeps until they are fetched."""


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """The configuration of one process of a run."""

    config: RunConfig
    vocabulary: int
    pool: str
    """the pool whose devices the process uses"""
    given: GivenCode = field(default=GivenCode())
    """what the calling program defines itself"""

    def enter(self) -> None:
        """Set the process up. Unless the recipe says otherwise, it computes with as many threads as its replica has
        CPUs."""
        process.enter(self.config)
        self.given.register()
        pool = self.config.pools[self.pool]
        torch.set_num_threads(self.config.threads or (pool.devices if pool.device == "cpu" else 1))
        seed_rng(self.config.seed)

    @property
    def device(self) -> str:
        return device_of(self.pool, self.config.pools[self.pool])


def device_of(name: str, pool: PoolSettings) -> str:
    """Return the torch device for the models of a process in this pool. Ray shows a process only the GPUs that it
    holds, so `cuda` means the first of them."""
    if pool.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        held = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(
            f"pools.{name}.device is gpu, but torch sees no GPU in process {os.getpid()} on {socket.gethostname()} "
            f"(CUDA_VISIBLE_DEVICES: {held}; torch {torch.__version__} is built for CUDA: {torch.version.cuda}): "
            f"install a torch with CUDA and a driver on that node, or set pools.{name}.device to cpu"
        )
    return "cuda"


class Actor:
    """The base of all actors."""

    settings: ProcessConfig

    async def pid(self) -> int:
        return os.getpid()

    async def place(self) -> ProcessPlace:
        """Return where this process is and what it computes on."""
        pool = self.settings.config.pools[self.settings.pool]
        if pool.device == "gpu":
            return ProcessPlace(node_address(), "gpu", gpu_ids())
        return ProcessPlace(node_address(), "cpu", (), pool.devices)


class EngineActor(Actor):
    """One replica of the student, a teacher or the reference, with a scheduler of its own."""

    def __init__(self, settings: ProcessConfig, role: Role, teacher: str, name: str) -> None:
        settings.enter()
        self.settings, coordinator = settings, find_coordinator()
        config, vocabulary, device = settings.config, settings.vocabulary, settings.device
        self.name = name
        modality = modality_of(config)
        self.engine = modality.engine(role, teacher, vocabulary, device)
        cached = role == "teacher"
        self.scorer = modality.teacher_scorer(teacher, self.engine, vocabulary, device) if cached else self.engine
        self._coordinator = coordinator if role == "student" else None
        """has the newest weights, in case this student was restarted after their publication"""
        self._running_engine = self.engine.running()
        self._scheduler = InlineScheduler([self.engine], config.engine.score_every)
        self._started: asyncio.Task[None] | None = None
        self._intervals: list[Interval] = []
        coordinator.send(Coordinator.record_start, ProcessStart(name, actor_id(), os.getpid(), time.time()))

    async def ready(self) -> int:
        await self._running()
        return os.getpid()

    async def generate(self, request: AnyRequest) -> AnyOutput:
        await self._running()
        start = time.time()
        with _dying_with(self.engine):
            answer = await self.engine.generate(request)
        self._note("generate", request.id, start)
        return answer

    async def score(self, request: AnyScoreRequest) -> Scores:
        await self._running()
        start = time.time()
        with _dying_with(self.engine):
            scores = await self.scorer.score(request)
        self._note("score", "/".join(map(str, request.key)), start)
        return scores

    async def load(self, version: int, buckets: list[WeightBucket]) -> None:
        """Load weights of the learner, bucket by bucket."""
        with _dying_with(self.engine):
            await self.engine.load(version, (named for bucket in buckets for named in bucket.get()))

    async def forget_prefixes(self) -> None:
        with _dying_with(self.engine):
            await self.engine.load(self.engine.version, None)

    async def sleep(self) -> None:
        """Free the memory of the device until the next weights."""
        with _dying_with(self.engine):
            await self.engine.sleep()

    async def seconds(self) -> tuple[float, float]:
        return take_seconds([self.engine])

    async def counts(self) -> dict[str, Any]:
        return teacher_counts(self.engine, self.scorer)

    async def cache(self) -> CacheCounts:
        """Return what the score cache did since the last call."""
        return self.scorer.recent() if isinstance(self.scorer, CachedScorer) else CacheCounts()

    async def intervals(self) -> list[Interval]:
        """Return the times of the requests since the last call."""
        found, self._intervals = self._intervals, []
        return found

    async def in_flight(self) -> int:
        """Return the number of requests that wait or are under way."""
        return self.engine.in_flight

    async def _running(self) -> None:
        """Wait until the engine runs and has the newest weights."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        await self._running_engine.__aenter__()
        if self._coordinator is not None and (newest := await self._coordinator.call(Coordinator.weights)):
            await self.load(*newest)
        await self._scheduler.__aenter__()

    def _note(self, kind: Literal["generate", "score"], key: str, start: float) -> None:
        if len(self._intervals) < INTERVALS:
            self._intervals.append(Interval(self.name, kind, key, start, time.time()))


@contextmanager
def _dying_with(engine: Engine) -> Iterator[None]:
    """End this process if its engine is gone: Ray starts it again, with an engine that has the newest weights, and the
    requests that it had go to other replicas."""
    try:
        yield
    except ReplicaGone as error:
        print(f"{type(engine).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


class RemoteEngine:
    """An engine in another process, behind the interface that routers call."""

    def __init__(self, handle: ActorHandle[EngineActor]) -> None:
        self.handle = handle

    async def generate(self, request: AnyRequest) -> AnyOutput:
        return await self.handle.call(EngineActor.generate, request)

    async def score(self, request: AnyScoreRequest) -> Scores:
        return await self.handle.call(EngineActor.score, request)


@dataclass(frozen=True, slots=True)
class EngineHandles:
    """The engine replicas of a run."""

    student: tuple[ActorHandle[EngineActor], ...]
    teachers: dict[str, tuple[ActorHandle[EngineActor], ...]]
    reference: tuple[ActorHandle[EngineActor], ...] = ()

    def all(self) -> list[ActorHandle[EngineActor]]:
        return [*self.student, *(r for replicas in self.teachers.values() for r in replicas), *self.reference]


RunHandles = tuple[SampleQueue, EngineHandles]


def fetch_handles(coordinator: ActorHandle[Coordinator]) -> RunHandles:
    """Fetch the queue and engine handles that the driver registered."""
    return coordinator.call_sync(Coordinator.handles).get()


def teacher_pool(
    config: RunConfig, name: str, replicas: Sequence[ActorHandle[EngineActor]], balancer: LoadBalancer
) -> TeacherPool:
    """Return the replicas of a teacher, or of the reference, as one process calls them."""
    return TeacherPool(name, [RemoteEngine(handle) for handle in replicas], balancer, config.ray.request_deadline)


def teacher_pools(config: RunConfig, engines: EngineHandles, balancers: LoadBalancerClient) -> dict[str, TeacherPool]:
    return {
        name: teacher_pool(config, name, replicas, balancers[teacher_balancer(name)])
        for name, replicas in engines.teachers.items()
    }


Outcomes = asyncio.Queue[EpisodeDone | EpisodeFailure | BaseException | None]
"""Outcomes of the prompts that a worker was given; None or an error ends them."""


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """New outcomes of the prompts that a worker was given."""

    outcomes: list[EpisodeDone | EpisodeFailure]
    finished: bool
    user_error: UserError | None = None
    error: str | None = None
    """any other error, as text: not every exception can be pickled"""


class RolloutActor(Actor):
    """Runs agent loops, scores their episodes and writes their tensors to the queue."""

    def __init__(self, settings: ProcessConfig, name: str) -> None:
        settings.enter()
        self.settings, config, coordinator = settings, settings.config, find_coordinator()
        queue, engines = fetch_handles(coordinator)
        balancers = connect_load_balancers(coordinator, name)
        modality = modality_of(config)
        students = [RemoteEngine(handle) for handle in engines.student]
        self.student = Router("student", students, balancers[STUDENT], config.ray.request_deadline)
        self.pools = teacher_pools(config, engines, balancers)
        self.reference = teacher_pool(config, "reference", engines.reference, balancers[REFERENCE])
        self.rewards = reward_pool(config)
        judges = Judges(
            config,
            modality.reward_input,
            queue,
            modality.teacher_client(self.pools),
            self.reference if engines.reference else None,
            self.rewards,
        )
        self.rollout = Rollout(modality.loops(self._send), judges)
        self._rewards_started = False
        self._work: dict[int, Outcomes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ready(self) -> int:
        """Start the rewards. After a restart of this process, the first prompts do that."""
        if self.rewards is not None and not self._rewards_started:
            self._rewards_started = True
            await self.rewards.start()
        return os.getpid()

    async def gaps(self) -> list[str]:
        """Return what the kernel of this machine does not isolate the reward processes from."""
        return self.rewards.gaps if self.rewards is not None else []

    async def start(self, number: int, order: RolloutRequest, prompts: list[Prompt]) -> None:
        """Start to work on prompts; `report` with the same number returns their outcomes."""
        await self.ready()
        work = self._work[number] = Outcomes()
        task = asyncio.create_task(self._run(order, prompts, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def report(self, number: int) -> RolloutReport:
        """Wait for an outcome and for those that follow within COALESCED seconds."""
        work = self._work[number]
        found = [await work.get()]
        await asyncio.sleep(COALESCED)
        while not work.empty():
            found.append(work.get_nowait())
        outcomes = [o for o in found if isinstance(o, EpisodeDone | EpisodeFailure)]
        errors = [o for o in found if isinstance(o, BaseException)]
        if finished := (found[-1] is None or bool(errors)):
            del self._work[number]
        user_errors = [error for error in errors if isinstance(error, UserError)]
        other = repr(errors[0]) if errors and not user_errors else None
        return RolloutReport(outcomes, finished, user_errors[0] if user_errors else None, other)

    async def running(self) -> int:
        """Return the number of unfinished `start` calls."""
        return len(self._work)

    async def counts(self) -> dict[str, Any]:
        """Return the numbers of retried calls and the counts of the rewards."""
        return {
            "retries": {
                "student": self.student.retries,
                "reference": self.reference.router.retries,
                **{name: pool.router.retries for name, pool in self.pools.items()},
            },
            "rewards": dict(self.rewards.counts) if self.rewards is not None else {},
        }

    async def _run(self, order: RolloutRequest, prompts: list[Prompt], work: Outcomes) -> None:
        try:
            async for outcome in self.rollout.run(order, prompts):
                work.put_nowait(outcome)
        except Exception as error:
            work.put_nowait(error)
        else:
            work.put_nowait(None)

    async def _send(self, request: AnyRequest) -> AnyOutput:
        return await self.student.call(request.order[:2], lambda replica: replica.generate(request))


class LearnerActor(Actor):
    """One rank of the learner."""

    def __init__(self, settings: ProcessConfig, rank: int, ranks: int) -> None:
        settings.enter()
        self.settings, self.rank, self.count = settings, rank, ranks
        self.queue, _ = fetch_handles(find_coordinator())
        self._ranks: Ranks = alone
        self._steps = 0

    async def address(self) -> str:
        """Return a free address for the ranks' process group; called on the first rank."""
        with socket.socket() as found:
            found.bind(("", 0))
            return f"tcp://{node_address()}:{found.getsockname()[1]}"

    async def ready(self, address: str) -> int:
        """Join the other ranks and load the models."""
        config, vocabulary, device = self.settings.config, self.settings.vocabulary, self.settings.device
        spread: Spread = lambda model: None  # noqa: E731
        if self.count > 1:
            from tutelage.learner import fsdp

            self._ranks = fsdp.join(self.rank, self.count, address, device)
            dtype, _ = choose_dtype(config.student.dtype, device)
            sharding = fsdp.Sharding(dtype if dtype != torch.float32 else None, config.learner.activation_checkpointing)
            spread = lambda model: fsdp.shard(model, sharding, device)  # noqa: E731
        self.learner = modality_of(config).learner(self.queue, vocabulary, device, self._ranks, spread)
        return os.getpid()

    async def busy(self) -> int:
        """Return the number of steps under way. Answers while a step waits for its rows, not while it computes."""
        return self._steps

    async def learn(self, ref: BatchRef, rate: float, schedule: Schedule, shown: int) -> LearnResult:
        self._steps += 1
        try:
            return await self.learner.learn(ref, rate, schedule, shown)
        finally:
            self._steps -= 1

    async def measure(self, ref: BatchRef, columns: Sequence[str]) -> dict[str, Ragged]:
        return await self.learner.measure(ref, columns)

    async def swap(self) -> bool:
        """Exchange the weights and their running mean; False if there is no such mean."""
        self.learner.student.swap()
        return bool(self.learner.student.average)

    async def weights(self) -> list[WeightBucket]:
        """Gather the weights that engines take, in the dtype of computation, into buckets. All ranks take part; only
        rank 0 returns buckets."""
        buckets: list[WeightBucket] = []
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        dtype = self.learner.dtype if self.count > 1 else None  # a single rank keeps rounded weights beside its masters
        for name, tensor in self._gathered():
            if self.rank == 0:
                bucket.append((name, tensor.detach().to("cpu", dtype, copy=True)))
                size += bucket[-1][1].nbytes
                if size >= BUCKET:
                    buckets.append(Stored.put(bucket))
                    bucket, size = [], 0
        if bucket:
            buckets.append(Stored.put(bucket))
        return buckets

    async def save(self, directory: Path, keep: int, step: int, state: dict[str, Any], mark: Best | None) -> Path:
        """Write a checkpoint together with the other ranks, each its own slices."""
        from tutelage.checkpoint.sharded import ShardedStore

        tensors, own = learner_state(self.learner)
        seen = mark or Best(step)
        return ShardedStore(directory, keep, self._ranks).save_shards(
            step, tensors, {**state, **own}, best=mark is not None, measure=seen.measure, value=seen.value
        )

    async def restore(self, path: Path) -> Checkpoint:
        """Load a checkpoint; return its step and plain state, without tensors."""
        from tutelage.checkpoint.sharded import load_shards

        like, _ = learner_state(self.learner)
        found = load_shards(path, like, self._ranks)
        restore_learner(self.learner, found)
        return Checkpoint(found.step, {}, found.state)

    def _gathered(self) -> Any:
        from tutelage.learner.fsdp import gather

        student = self.learner.student
        if "whole" not in ENGINES[self.settings.config.engine.kind].weights:
            return gather(student.weights)
        if self.count == 1:
            return whole_weights(student.model.model).items()
        return with_tied_head(gather(student.weights), student.model.model)
