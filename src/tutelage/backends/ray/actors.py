"""What lives in the processes of a cluster besides the coordinator: engines, agent-loop workers, ranks of the learner.

Each is an ordinary class made of the same parts as a run in one process; `distributed` places them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tutelage.backends import process
from tutelage.backends.contract import LearnResult
from tutelage.backends.inline import learner_state, restore_learner, take_seconds
from tutelage.backends.ray.cluster import Remote, Stored, actor_id, node_address
from tutelage.backends.ray.coordinator import COORDINATOR, Started, desks
from tutelage.checkpoint.optimizer_state import seed_rng
from tutelage.checkpoint.store import Best, Checkpoint
from tutelage.config.schema import Pool, RunConfig
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Prompt
from tutelage.engines.contract import (
    DiffusionOutput,
    DiffusionRequest,
    GenerateRequest,
    Generation,
    ScoreRequest,
    Scores,
    StepScoreRequest,
)
from tutelage.engines.scheduler import InlineScheduler
from tutelage.errors import UserError
from tutelage.learner.ranks import Ranks, alone
from tutelage.learner.schedule import Schedule
from tutelage.modality import dispatch as stages
from tutelage.modality import text as build
from tutelage.modality.dispatch import Role
from tutelage.models.dtype import choose_dtype
from tutelage.queue.contract import BatchRef, SampleQueue
from tutelage.record.timeline import Interval
from tutelage.rollout.judges import Judges, reward_pool
from tutelage.rollout.runner import EpisodeDone, Rollout, RolloutRequest
from tutelage.rollout.worker import EpisodeFailure
from tutelage.routing.router import Desk, Router
from tutelage.routing.shared import REFERENCE, STUDENT, SharedDesks, of_teacher
from tutelage.teachers.pool import TeacherPool

COALESCED = 0.005
"""Seconds in which further outcomes may join the first that a worker reports."""
BUCKET = 256 * 1024 * 1024
"""Bytes of weights that travel together."""
INTERVALS = 20_000
"""Requests whose times an engine remembers until it is asked for them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every process of a run is told."""

    config: RunConfig
    vocabulary: int
    pool: str
    """where the process lives"""

    def enter(self) -> None:
        """Unless the recipe says otherwise, a process computes with as many threads as its replica has CPUs."""
        process.enter(self.config)
        pool = self.config.pools[self.pool]
        torch.set_num_threads(self.config.threads or (pool.devices if pool.device == "cpu" else 1))
        seed_rng(self.config.seed)

    @property
    def device(self) -> str:
        return device_of(self.pool, self.config.pools[self.pool])


def device_of(name: str, pool: Pool) -> str:
    """Where the models of a process in this pool live, as torch calls it. Ray shows a process the GPUs that it holds
    and no others, so the first one is meant."""
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
    """What every process can be asked."""

    async def pid(self) -> int:
        return os.getpid()


class EngineActor(Actor):
    """One replica of the student, a teacher or the reference, with a scheduler of its own."""

    def __init__(self, setting: Setting, role: Role, teacher: str, name: str) -> None:
        setting.enter()
        coordinator = Remote.find(COORDINATOR)
        config, vocabulary, device = setting.config, setting.vocabulary, setting.device
        self.name = name
        self.engine = stages.engine(config, role, teacher, vocabulary, device)
        self._coordinator: Remote | None = coordinator if role == "student" else None
        """a student's: it may have been started again after weights were published"""
        self._scheduler = InlineScheduler([self.engine], config.engine.score_every)
        self._started: asyncio.Task[None] | None = None
        self._intervals: list[Interval] = []
        coordinator.tell("started", Started(name, actor_id(), os.getpid(), time.time()))

    async def ready(self) -> int:
        await self._running()
        return os.getpid()

    async def generate(self, request: GenerateRequest | DiffusionRequest) -> Generation | DiffusionOutput:
        await self._running()
        start = time.time()
        answer: Generation | DiffusionOutput = await self.engine.generate(request)
        self._note("generate", request.id, start)
        return answer

    async def score(self, request: ScoreRequest | StepScoreRequest) -> Scores:
        await self._running()
        start = time.time()
        scores: Scores = await self.engine.score(request)
        self._note("score", "/".join(map(str, request.key)), start)
        return scores

    async def load(self, version: int, buckets: list[Stored]) -> None:
        """Weights of the learner, bucket by bucket."""
        await self.engine.load(version, (named for bucket in buckets for named in bucket.get()))

    async def forget(self) -> None:
        await self.engine.load(self.engine.version, None)

    async def seconds(self) -> tuple[float, float]:
        return take_seconds([self.engine])

    async def counts(self) -> dict[str, Any]:
        return asdict(self.engine.counts)

    async def intervals(self) -> list[Interval]:
        """Times of the requests since this was last asked."""
        found, self._intervals = self._intervals, []
        return found

    async def in_flight(self) -> int:
        """Requests that wait or are under way."""
        found: int = self.engine.scoring + self.engine.writing
        return found

    async def _running(self) -> None:
        """Nobody is served before the engine runs, with the newest weights."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        if self._coordinator is not None and (newest := await self._coordinator.call("weights")) is not None:
            await self.load(*newest)
        await self._scheduler.__aenter__()

    def _note(self, kind: Literal["generate", "score"], key: str, start: float) -> None:
        if len(self._intervals) < INTERVALS:
            self._intervals.append(Interval(self.name, kind, key, start, time.time()))


class RemoteEngine:
    """An engine in another process, as routers see it."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    async def generate(self, request: GenerateRequest | DiffusionRequest) -> Generation | DiffusionOutput:
        answer: Generation | DiffusionOutput = await self.remote.call("generate", request)
        return answer

    async def score(self, request: ScoreRequest | StepScoreRequest) -> Scores:
        scores: Scores = await self.remote.call("score", request)
        return scores


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the replicas are."""

    student: tuple[Remote, ...]
    teachers: dict[str, tuple[Remote, ...]]
    reference: tuple[Remote, ...] = ()

    def all(self) -> list[Remote]:
        return [*self.student, *(r for replicas in self.teachers.values() for r in replicas), *self.reference]


def met(coordinator: Remote) -> tuple[SampleQueue, Engines]:
    """Who is who, as the run has said before anybody could ask."""
    company: tuple[SampleQueue, Engines] = coordinator.ask("company").get()
    return company


def pool(config: RunConfig, name: str, replicas: Sequence[Remote], desk: Desk) -> TeacherPool:
    """Replicas that score, as one process sees them."""
    return TeacherPool(name, [RemoteEngine(remote) for remote in replicas], desk, config.ray.request_deadline)


def pools(config: RunConfig, engines: Engines, shared: SharedDesks) -> dict[str, TeacherPool]:
    return {name: pool(config, name, replicas, shared[of_teacher(name)]) for name, replicas in engines.teachers.items()}


Outcomes = asyncio.Queue[EpisodeDone | EpisodeFailure | BaseException | None]
"""Of the prompts that a worker was given; None or an error is the last one."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says about the prompts it was given."""

    outcomes: list[EpisodeDone | EpisodeFailure]
    over: bool
    mistake: UserError | None = None
    error: str | None = None


class RolloutActor(Actor):
    """Runs agent loops and scores their episodes; their tensors go from here to the queue."""

    def __init__(self, setting: Setting, name: str) -> None:
        setting.enter()
        config, coordinator = setting.config, Remote.find(COORDINATOR)
        queue, engines = met(coordinator)
        shared = desks(coordinator, name)
        tokenizer, tokenizers = stages.words(config)
        students = [RemoteEngine(remote) for remote in engines.student]
        self.student = Router("student", students, shared[STUDENT], config.ray.request_deadline)
        self.pools = pools(config, engines, shared)
        self.reference = pool(config, "reference", engines.reference, shared[REFERENCE])
        self.rewards = reward_pool(config)
        judges = Judges(
            config,
            stages.made(tokenizer),
            queue,
            build.teacher_client(config, self.pools, tokenizers),
            self.reference if engines.reference else None,
            self.rewards,
        )
        self.rollout = Rollout(build.loops(config, tokenizer, self._send), judges)
        self._judging = False
        self._work: dict[int, Outcomes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ready(self) -> int:
        """Also after a new start, when the first prompts come."""
        if self.rewards is not None and not self._judging:
            self._judging = True
            await self.rewards.start()
        return os.getpid()

    async def gaps(self) -> list[str]:
        """What this machine does not let the rewards' processes be isolated from."""
        return self.rewards.gaps if self.rewards is not None else []

    async def start(self, number: int, order: RolloutRequest, prompts: list[Prompt]) -> None:
        """Begin; `report` tells how it goes."""
        await self.ready()
        work = self._work[number] = Outcomes()
        task = asyncio.create_task(self._run(order, prompts, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def report(self, number: int) -> Report:
        """Wait for an outcome, and for those that come right after it."""
        work = self._work[number]
        found = [await work.get()]
        await asyncio.sleep(COALESCED)
        while not work.empty():
            found.append(work.get_nowait())
        outcomes = [o for o in found if isinstance(o, EpisodeDone | EpisodeFailure)]
        errors = [o for o in found if isinstance(o, BaseException)]
        if over := (found[-1] is None or bool(errors)):
            del self._work[number]
        mistakes = [error for error in errors if isinstance(error, UserError)]
        said = repr(errors[0]) if errors and not mistakes else None
        return Report(outcomes, over, mistakes[0] if mistakes else None, said)

    async def running(self) -> int:
        """Shares of prompts under way."""
        return len(self._work)

    async def counts(self) -> dict[str, Any]:
        """Calls made again, and what happened to rewards."""
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

    async def _send(self, request: GenerateRequest | DiffusionRequest) -> Generation | DiffusionOutput:
        return await self.student.call(request.order[:2], lambda replica: replica.generate(request))


class LearnerActor(Actor):
    """One rank of the learner."""

    def __init__(self, setting: Setting, rank: int, ranks: int) -> None:
        setting.enter()
        self.setting, self.rank, self.count = setting, rank, ranks
        self.queue, _ = met(Remote.find(COORDINATOR))
        self._ranks: Ranks = alone
        self._steps = 0

    async def address(self) -> str:
        """Where ranks can meet; asked of the first one."""
        with socket.socket() as found:
            found.bind(("", 0))
            return f"tcp://{node_address()}:{found.getsockname()[1]}"

    async def ready(self, address: str) -> int:
        """Meet the others and load the models."""
        config, vocabulary, device = self.setting.config, self.setting.vocabulary, self.setting.device
        spread: build.Spread = lambda model: None  # noqa: E731
        if self.count > 1:
            from tutelage.learner import fsdp

            self._ranks = fsdp.join(self.rank, self.count, address, device)
            dtype, _ = choose_dtype(config.student.dtype, device)
            sharding = fsdp.Sharding(dtype if dtype != torch.float32 else None, config.learner.activation_checkpointing)
            spread = lambda model: fsdp.shard(model, sharding, device)  # noqa: E731
        self.learner = stages.learner(config, self.queue, vocabulary, device, self._ranks, spread)
        return os.getpid()

    async def busy(self) -> int:
        """Steps under way; answered while one waits for its rows, not while it computes."""
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
        """Weights and their running mean change places; False if there is no such mean."""
        self.learner.student.swap()
        return bool(self.learner.student.average)

    async def weights(self) -> list[Stored]:
        """What learns, whole, as it computes, in buckets, from rank 0; the others only take part."""
        buckets: list[Stored] = []
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        dtype = self.learner.dtype if self.count > 1 else None  # one rank has weights that compute beside its masters
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
        """Together with the other ranks, each its own slices."""
        from tutelage.checkpoint.sharded import ShardedStore

        tensors, own = learner_state(self.learner)
        seen = mark or Best(step)
        return ShardedStore(directory, keep, self._ranks).save_shards(
            step, tensors, {**state, **own}, best=mark is not None, measure=seen.measure, value=seen.value
        )

    async def restore(self, path: Path) -> Checkpoint:
        """Returns the plain state; the tensors stay here."""
        from tutelage.checkpoint.sharded import load_shards

        like, _ = learner_state(self.learner)
        found = load_shards(path, like, self._ranks)
        restore_learner(self.learner, found)
        return Checkpoint(found.step, {}, found.state)

    def _gathered(self) -> Any:
        from tutelage.learner.fsdp import gather

        return gather(self.learner.student.weights)
