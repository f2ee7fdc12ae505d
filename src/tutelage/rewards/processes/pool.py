"""Run rewards in isolated worker processes that can be killed.

The process of a reward is killed when the reward exceeds its timeout, even inside a regular expression that never
releases the interpreter, or exceeds a limit of memory, processes or output. A new process replaces it. Answers that
wait are not affected: their timeouts start when their rewards start.

Rewards with the same isolation share processes.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, get_args

from tutelage.errors import UserError
from tutelage.isolation.contract import Isolation
from tutelage.isolation.guard import Ended
from tutelage.rewards.contract import Answer, Judgement, RewardSpec, Work
from tutelage.rewards.processes import wire
from tutelage.rewards.processes.process import START_DEADLINE, WorkerLost, WorkerProcess, launch

BEGIN_DEADLINE = 60.0
"""Seconds within which an idle worker must read an answer and start its first reward."""

CLOSED = "the reward pool is closed"

ATTEMPTS = 3
"""Number of workers that may die on an answer before its first reward has started."""

AHEAD = 8
"""Answers that are sent ahead to a single worker, so that it continues without waiting for the pool. With several
workers, each has one answer at a time, so that no answer waits behind a slow one."""


Counted = Literal[
    "scored",
    "raised",
    "not_finite",
    "timed_out",
    "too_much_memory",
    "too_many_processes",
    "too_much_output",
    "died",
    "restarted",
]
"""The outcomes of answers (each answer has one), and, last, the number of workers that were replaced."""

LIMITS: dict[str, tuple[Counted, str]] = {
    "memory": ("too_much_memory", "memory_gb"),
    "processes": ("too_many_processes", "processes"),
    "output": ("too_much_output", "output_mb"),
}
"""For each limit of the guard: the outcome of an answer whose reward exceeds it, and the setting of the limit."""


class _Failed(Exception):
    """A reward did not return a value."""

    def __init__(self, outcome: Counted, message: str, *, at_rest: bool = False) -> None:
        super().__init__(message)
        self.outcome: Counted = outcome
        self.at_rest = at_rest
        """the worker itself reported the failure, and is ready for the next answer"""


class _NotBegun(Exception):
    """The worker was lost before it started on the answer, so another worker may try."""

    def __init__(self, *, behind: bool) -> None:
        super().__init__()
        self.behind = behind
        """the worker was lost to an earlier answer"""


class _Slot:
    """Holds one worker; a worker that is lost is replaced by a new one."""

    def __init__(self, worker: asyncio.Task[WorkerProcess]) -> None:
        self.worker = worker


class RewardPool:
    """Scores answers with all rewards of a run.

    async with RewardPool({"right": RewardSpec("numeric")}, processes=2) as pool:
        judgement = await pool.score(Answer("What is 6 times 7?", "It is 42.", ground_truth="42"))

    `processes` is the number of processes for each isolation that the rewards need. `functions` are pickled rewards
    that the calling program defines itself; every process gets them over its socket. `seed` is that of the run; the
    random numbers of a reward depend only on it and on the answer.
    """

    def __init__(
        self,
        specs: Mapping[str, RewardSpec],
        plugins: Sequence[str] = (),
        processes: int = 1,
        *,
        functions: bytes = b"",
        seed: int = 0,
        start_deadline: float = START_DEADLINE,
    ) -> None:
        if not specs:
            raise UserError("rewards: there are none; name at least one")
        if processes < 1:
            raise UserError(f"rewards: at least one process is needed, got {processes}")
        self.counts: dict[Counted, int] = dict.fromkeys(get_args(Counted), 0)
        self._specs = dict(specs)
        alike: dict[Isolation, dict[str, RewardSpec]] = {}
        for name, spec in specs.items():
            alike.setdefault(spec.isolation, {})[name] = spec
        self._crews = [
            _Crew(Work(group, tuple(plugins), functions, seed), isolation, processes, start_deadline, self.counts)
            for isolation, group in alike.items()
        ]
        self._started = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready or busy."""
        return [pid for crew in self._crews for pid in crew.pids]

    @property
    def gaps(self) -> list[str]:
        """What the kernel does not allow to isolate, as sentences; known after the start."""
        return list(dict.fromkeys(gap for crew in self._crews for gap in crew.gaps))

    async def start(self) -> None:
        """Start the workers. Raises UserError with all mistakes in plugins, names, options and numbers."""
        if self._started:
            raise RuntimeError("the reward pool was started before")
        self._started = True
        if problems := list(_unset_variables(self._specs)):
            raise UserError("\n".join(problems))
        try:
            found = await asyncio.gather(*(crew.start() for crew in self._crews), return_exceptions=True)
            for error in found:
                if error is not None and not isinstance(error, UserError):
                    raise error
            if mistakes := [line for error in found if error is not None for line in str(error).splitlines()]:
                raise UserError("\n".join(dict.fromkeys(mistakes)))
        except BaseException:
            await self.close()
            raise

    async def score(self, answer: Answer) -> Judgement:
        """Run all rewards on the answer, up to the first that fails.

        Rewards run one after the other: grouped by isolation, then in the order of the specs.
        """
        if not self._started:
            raise RuntimeError("start the reward pool before scoring: `await pool.start()`")
        parts: dict[str, float] = {}
        try:
            try:
                frame = wire.frame(pickle.dumps(answer))
            except Exception as error:
                raise _Failed("raised", f"the answer cannot be sent to a worker; pickling raised: {error!r}") from None
            for crew in self._crews:
                await crew.run(frame, parts)
            reward = math.fsum(spec.weight * parts[name] for name, spec in self._specs.items())
            if not math.isfinite(reward):
                raise _Failed("not_finite", f"the weighted sum of the rewards is not a finite number: {reward}")
        except _Failed as failed:
            self.counts[failed.outcome] += 1
            return Judgement(None, parts, str(failed))
        self.counts["scored"] += 1
        return Judgement(reward, parts)

    async def close(self) -> None:
        """Stop all processes, even busy ones; pending calls of `score` raise RuntimeError. Safe to repeat."""
        await asyncio.gather(*(crew.close() for crew in self._crews))


class _Crew:
    """Worker processes with the same isolation, and the rewards that they run."""

    def __init__(
        self, work: Work, isolation: Isolation, processes: int, start_deadline: float, counts: dict[Counted, int]
    ) -> None:
        self.idle: asyncio.Queue[_Slot | None] = asyncio.Queue()
        """slots; each appears once for every further answer that its worker can take"""
        self.gaps: list[str] = []
        self._work = work
        self._isolation = isolation
        self._processes = processes
        self._start_deadline = start_deadline
        self._counts = counts
        self._slots: list[_Slot] = []
        self._ending: set[WorkerProcess] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [slot.worker.result().pid for slot in self._slots if _is_ready(slot.worker)]

    async def start(self) -> None:
        self._slots = [_Slot(asyncio.create_task(self._launch(None))) for _ in range(self._processes)]
        workers = await asyncio.gather(*(slot.worker for slot in self._slots))
        self.gaps = workers[0].gaps
        for _ in range(AHEAD if self._processes == 1 else 1):
            for slot in self._slots:
                self.idle.put_nowait(slot)

    async def close(self) -> None:
        self._closed = True
        self.idle.put_nowait(None)
        workers = [slot.worker for slot in self._slots]
        for worker in workers:
            if _is_ready(worker):
                worker.result().kill()
            else:
                worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self._ending.update(worker.result() for worker in workers if _is_ready(worker))
        self._slots = []
        await asyncio.gather(*(worker.reap() for worker in self._ending))

    async def run(self, frame: bytes, parts: dict[str, float]) -> None:
        """Run the rewards and fill in `parts`. Raises _Failed at the first reward that fails."""
        lost = 0
        while lost < ATTEMPTS:
            slot, worker = await self._acquire()
            try:
                return await self._judge(worker, frame, parts)
            except _NotBegun as error:
                lost += not error.behind
            except _Failed:
                if self._closed:
                    raise RuntimeError(CLOSED) from None
                raise
            finally:
                self._release(slot, worker)
        raise _Failed("died", f"the worker died {ATTEMPTS} times before a reward had begun")

    async def _judge(self, worker: WorkerProcess, frame: bytes, parts: dict[str, float]) -> None:
        """Score one answer on one worker. The worker is killed unless it is known to be ready for the next answer."""
        at_rest = False
        try:
            worker.send(frame)
            async with worker.turn:
                if worker.spent:
                    raise _NotBegun(behind=True)
                for number, (name, spec) in enumerate(self._work.specs.items()):
                    await self._begun(worker, name, first=number == 0)
                    parts[name] = await self._value(worker, name, spec)
            at_rest = True
        except _Failed as failed:
            at_rest = failed.at_rest
            raise
        finally:
            if not at_rest:
                worker.spend()

    async def _begun(self, worker: WorkerProcess, name: str, *, first: bool) -> None:
        """Wait until the worker reports that the next reward has started."""
        try:
            report = await worker.receive(BEGIN_DEADLINE)
        except TimeoutError:
            raise _Failed("timed_out", f"timed out: the worker did not begin within {BEGIN_DEADLINE:g} s") from None
        except WorkerLost:
            if first:
                raise _NotBegun(behind=False) from None
            raise _lost(await worker.end(), "the worker died between two rewards", name) from None
        if report["kind"] == "unreadable":
            why = f"the worker cannot read the answer; that raised: {report['why']}"
            raise _Failed("raised", why, at_rest=True)

    async def _value(self, worker: WorkerProcess, name: str, spec: RewardSpec) -> float:
        """Return the value of the running reward."""
        who, timeout = f"reward {name!r} ({spec.function})", spec.timeout
        late = _Failed("timed_out", f"{who} timed out after {timeout:g} s")
        try:
            report = await worker.receive(timeout)
        except TimeoutError:
            raise late from None
        except WorkerLost:
            raise _lost(await worker.end(), f"{who}: the worker died while it ran", name) from None
        if report["seconds"] > timeout:
            raise late
        if report["kind"] == "raised":
            raise _Failed("raised", f"{who} raised: {report['why']}", at_rest=True)
        if report["kind"] == "not_finite":
            why = f"{who} returned {report['why']}, which is not a finite number"
            raise _Failed("not_finite", why, at_rest=True)
        return report["value"]

    async def _launch(self, old: WorkerProcess | None) -> WorkerProcess:
        if old is not None:
            await old.reap()
            self._ending.discard(old)
        return await launch(self._work, self._isolation, self._start_deadline)

    async def _acquire(self) -> tuple[_Slot, WorkerProcess]:
        """Wait for a worker for one answer, first come, first served. Raises UserError if a worker cannot start."""
        while True:
            slot = await self.idle.get()
            if slot is None:
                self.idle.put_nowait(None)
                raise RuntimeError(CLOSED)
            starting = slot.worker
            try:
                worker = await asyncio.shield(starting)
            except asyncio.CancelledError:
                if starting.cancelled():
                    raise RuntimeError(CLOSED) from None
                self.idle.put_nowait(slot)
                raise
            except Exception:
                if slot.worker is starting:
                    slot.worker = asyncio.create_task(self._launch(None))
                self.idle.put_nowait(slot)
                raise
            if worker.usable:
                return slot, worker
            self._release(slot, worker)

    def _release(self, slot: _Slot, worker: WorkerProcess) -> None:
        """Free the slot for the next answer, and replace the worker if it is lost and not yet replaced."""
        if self._closed:
            return
        if not worker.usable and _is_ready(slot.worker) and slot.worker.result() is worker:
            worker.kill()
            self._ending.add(worker)
            self._counts["restarted"] += 1
            slot.worker = asyncio.create_task(self._launch(worker))
        self.idle.put_nowait(slot)


def _unset_variables(specs: Mapping[str, RewardSpec]) -> Iterator[str]:
    for name, spec in specs.items():
        for variable in spec.env:
            if variable not in os.environ:
                yield (
                    f"rewards.{name}.env: {variable} is not set in the environment of the run: set it, or remove it "
                    "from the list"
                )


def _lost(ended: Ended, died: str, name: str) -> _Failed:
    """Return the failure of an answer whose worker was lost."""
    if not ended["broke"]:
        return _Failed("died", f"{died} ({ended['how']})")
    outcome, setting = LIMITS[ended["broke"]]
    return _Failed(outcome, f"reward {name!r} was stopped: {ended['why']}; rewards.{name}.{setting} sets the limit")


def _is_ready(worker: asyncio.Task[WorkerProcess]) -> bool:
    return worker.done() and not worker.cancelled() and worker.exception() is None
