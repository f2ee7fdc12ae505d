"""Processes on a Ray cluster: a place for every replica of every pool, and calls that say who did not answer.

Nothing here knows what the processes do. A *host* is an ordinary class; spawned, each replica of it lives in an actor
of its own, in the placement group of its pool's replica. Actors end with the process that spawned them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tutelage.backends.placement import CannotPlace, Node, left_for_pools, place
from tutelage.config.schema import Pool
from tutelage.config.schema import Ray as Settings
from tutelage.errors import ReplicaGone, RunLost, UserError, missing_extra

try:
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise missing_extra("runtime: ray", "ray", "ray", error) from error

OPEN_CALLS = 10_000
"""Calls that one actor has open at once."""
PERIOD = 1.0
"""Seconds between questions to a process whether it is still there."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A host in another process. Can be sent to other processes."""

    name: str
    """as errors call it"""
    actor: Any

    async def call(self, method: str, *args: Any) -> Any:
        """Its answer. What the host raised is raised here; ReplicaGone if it is not there."""
        try:
            return await getattr(self.actor, method).remote(*args)
        except Exception as error:
            raise self._explained(error) from error

    def ask(self, method: str, *args: Any) -> Any:
        """The same from code that cannot wait otherwise."""
        try:
            return ray.get(getattr(self.actor, method).remote(*args))
        except Exception as error:
            raise self._explained(error) from error

    def tell(self, method: str, *args: Any) -> None:
        """Without waiting for an answer."""
        getattr(self.actor, method).remote(*args)

    @classmethod
    def find(cls, name: str) -> Remote:
        """A host of the same run that was spawned to be found."""
        return cls(name, ray.get_actor(name))

    async def gone(self, deadline: float) -> ReplicaGone:
        """Wait until the process has died, or has not answered for `deadline` seconds; it is then ended, so that nobody
        waits for it any longer."""
        now = asyncio.get_running_loop().time
        until = now() + deadline
        while True:
            try:
                async with asyncio.timeout_at(until):  # wait_for may swallow a cancellation
                    await self.call("__ray_ready__")
            except TimeoutError:
                ray.kill(self.actor)
                return ReplicaGone(f"{self.name} has not answered for {deadline:g} s", for_good=True)
            except ReplicaGone as error:
                if error.for_good:
                    return error
                await asyncio.sleep(min(PERIOD, deadline / 4))
            else:
                await asyncio.sleep(min(PERIOD, deadline / 4))
                until = now() + deadline

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            return error.cause
        if isinstance(error, RayActorError):
            back, said = isinstance(error, ActorUnavailableError), " ".join(str(error).split())
            if error.actor_init_failed:
                return ReplicaGone(f"{self.name} could not start: {_raised(str(error))}", for_good=True)
            state = "is being started again" if back else "died and will not be started again"
            return ReplicaGone(f"{self.name} {state}: {said[:300]}", for_good=not back)
        return error


def _raised(trace: str) -> str:
    """What a process said last, of the traceback that it left: from the last line that begins with an error's name."""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    named = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Gone)\b", line)]
    return " ".join(lines[named[-1] if named else -3 :])[:1000]


@dataclass(frozen=True, slots=True)
class Stored:
    """A value in the cluster's object store, to be read by whoever gets this."""

    ref: Any

    @classmethod
    def put(cls, value: Any) -> Stored:
        return cls(ray.put(value))

    def get(self) -> Any:
        return ray.get(self.ref)


class Cluster:
    """A Ray cluster in which every replica of every pool has its place."""

    def __init__(self, settings: Settings, pools: Mapping[str, Pool]) -> None:
        """Connects, or starts a local cluster; refuses what does not fit, with the numbers."""
        self.pools = pools
        options: dict[str, Any] = {}
        if settings.address is None:
            import torch  # not for the small processes, which would spend their start on it

            gpus = torch.cuda.device_count()
            options = {"include_dashboard": False, "num_cpus": settings.cpus, "num_gpus": gpus}
            place(pools, left_for_pools([Node("this machine", settings.cpus, gpus)]))
        if ray.is_initialized():
            raise UserError("this process is connected to a Ray cluster already: one run at a time")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(address=settings.address, log_to_driver=False, logging_level=logging.ERROR, **options)
        self._groups: dict[tuple[str, int], PlacementGroup] = {}
        try:
            self.placement = place(pools, left_for_pools(self.nodes()))
            self._reserve(settings.deadline)
        except BaseException:
            self.close()
            raise

    def nodes(self) -> list[Node]:
        """What is there, whether in use or not, by Ray's name for a node."""
        return [
            Node(str(node["NodeID"]), int(found.get("CPU", 0)), int(found.get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"]
            for found in [node["Resources"]]
        ]

    def _reserve(self, deadline: float) -> None:
        """Take every replica's devices: on the node that was chosen for it, on another one if that is in use (or dies
        later). Those that may straddle come last, as when places were chosen, and go where Ray has room. What others
        still use is waited for, not for ever."""
        for where in sorted(self.placement.places, key=lambda where: where.bundle.straddle):
            wanted = where.bundle
            kind = wanted.device.upper()
            if wanted.straddle:
                group = placement_group([{kind: 1}] * wanted.devices, strategy="PACK")
            else:
                [share] = where.shares
                group = placement_group(
                    [{kind: wanted.devices}], strategy="STRICT_PACK", _soft_target_node_id=share.node
                )
            self._groups[wanted.pool, wanted.replica] = group
        try:
            ray.get([group.ready() for group in self._groups.values()], timeout=deadline)
        except GetTimeoutError:
            raise CannotPlace(self._waiting(deadline)) from None

    def _waiting(self, deadline: float) -> str:
        free = ray.available_resources()
        asked = [f"pool {name}: {p.replicas} × {p.devices} {p.device.upper()}" for name, p in self.pools.items()]
        there = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free now"
        return (
            f"the cluster did not give all pools their places within ray.deadline = {deadline:g} s "
            f"({there}, the rest is in use):\n  " + "\n  ".join(asked)
        )

    def spawn(
        self,
        host: type,
        name: str,
        pool: str | None,
        replica: int,
        *args: Any,
        share: float = 1.0,
        restarts: int = 0,
    ) -> Remote:
        """A host in the place of its pool's replica (None: anywhere, without a device of its own, and to be found by
        its name). `share`: its part of the devices there; as a process is on one node, it holds one device of a replica
        that may straddle nodes. The arguments of one that may be started again hold no handles of others: Ray keeps
        such arguments no longer than it must."""
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": OPEN_CALLS, "max_restarts": restarts}
        if pool is None:
            options["name"] = name
        else:
            group, wanted = self._groups[pool, replica], self.pools[pool]
            held = (1 if wanted.straddle else wanted.devices) * share
            options[f"num_{wanted.device}s"] = held if held < 1 else int(held)  # Ray divides one device, not several
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            )
        return Remote(name, ray.remote(host).options(**options).remote(*args))

    def close(self) -> None:
        """Give everything back; a cluster that this process started ends."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()


async def all_within(calls: Mapping[str, Coroutine[Any, Any, Any]], deadline: float, what: str) -> None:
    """Wait for calls to several processes, given by name; whoever does not answer in time is named."""
    tasks = [asyncio.create_task(call, name=name) for name, call in calls.items()]
    done, waiting = await asyncio.wait(tasks, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
    for task in waiting:
        task.cancel()
    for task in done:
        if (error := task.exception()) is not None:
            raise error
    if waiting:
        late = ", ".join(sorted(task.get_name() for task in waiting))
        raise UserError(f"{what} did not finish within {deadline:g} s: no answer from {late}")


@asynccontextmanager
async def needing(
    remotes: Sequence[Remote], deadline: float, release: Callable[[], None], why: str
) -> AsyncIterator[None]:
    """While entered, all these processes must be there. When one dies, or does not answer for `deadline` seconds, what
    is inside is cancelled, and RunLost names the process and says `why` it is needed; so it does where such a loss is
    the cause of an error inside. `release` ends whatever cannot be cancelled."""
    inside = asyncio.current_task()
    assert inside is not None
    watches = [asyncio.create_task(remote.gone(deadline)) for remote in remotes]
    cancelled = 0

    async def interrupt() -> None:
        nonlocal cancelled
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        while True:  # what must not be left half-way swallows a cancellation
            release()
            cancelled += inside.cancel()
            await asyncio.sleep(PERIOD)

    interrupting = asyncio.create_task(interrupt())
    try:
        yield
    except BaseException as error:
        interrupting.cancel()
        for _ in range(cancelled):
            inside.uncancel()
        if isinstance(error, Exception) and not cancelled:
            await _asked_again(remotes, watches)
        lost = [watch.result() for watch in watches if watch.done()]
        if lost and (cancelled or isinstance(error, Exception)):
            release()
            raise RunLost(f"{lost[0]}\n{why}") from error
        raise
    finally:
        for task in (interrupting, *watches):
            task.cancel()
        with suppress(asyncio.CancelledError):  # one that came when all was done
            await asyncio.gather(interrupting, *watches, return_exceptions=True)


async def _asked_again(remotes: Sequence[Remote], watches: Sequence[asyncio.Task[ReplicaGone]]) -> None:
    """Something went wrong: if one of the processes has died, its watch knows it when this returns."""
    answers = [asyncio.create_task(remote.call("__ray_ready__")) for remote in remotes]
    await asyncio.wait(answers, timeout=PERIOD)
    dead = [w for answer, w in zip(answers, watches, strict=True) if answer.done() and answer.exception() is not None]
    for answer in answers:
        answer.cancel()
    if dead:
        await asyncio.wait(dead, timeout=3 * PERIOD)


def node_address() -> str:
    """Of the machine that this process is on."""
    return str(ray.util.get_node_ip_address())


def actor_id() -> str:
    """Of the actor that this process is; it stays when the process is started again."""
    return str(ray.get_runtime_context().get_actor_id())
