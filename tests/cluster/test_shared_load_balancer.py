"""Test that routers of several processes share one load balancer, even if some of the processes die."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from typing import TypeVar

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from tutelage.backends.ray.coordinator import COORDINATOR, Coordinator, connect_load_balancers, find_coordinator
from tutelage.backends.ray.handles import ActorHandle
from tutelage.errors import UserError
from tutelage.routing.router import AllReplicasFailed, Router
from tutelage.routing.shared import Lease, LoadBalancerClient, LoadBalancerServer, Messages, Transport


class Gate:
    """A replica that answers when it is let go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open = asyncio.Event()

    async def answer(self) -> str:
        await self.open.wait()
        return self.name


class Wire:
    """A transport to a server in this process: counts messages, and each takes a moment."""

    def __init__(self, server: LoadBalancerServer) -> None:
        self.server = server
        self.messages = 0
        self.cut = False

    async def exchange(self, name: str, messages: Messages) -> list[Lease]:
        self.messages += 1
        await self._delay()
        leases = self.server.exchange(name, messages)
        await self._delay()
        return leases

    async def wait_for_leases(self, name: str) -> list[Lease]:
        await self._delay()
        return await self.server.wait_for_leases(name)

    def client(self, name: str) -> LoadBalancerClient:
        self.server.connect(name)
        return LoadBalancerClient(name, Transport(self.exchange, self.wait_for_leases))

    async def _delay(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        if self.cut:
            raise UserError("the run lost its coordinator")


def routers(
    count: int, replicas: list[Gate], limit: int, deadline: float | None = None
) -> tuple[Wire, list[Router[Gate]]]:
    """The routers of so many processes."""
    wire = Wire(LoadBalancerServer({"main": len(replicas)}, limit))
    clients = [wire.client(f"worker {number}") for number in range(count)]
    return wire, [Router("main", replicas, client["main"], deadline) for client in clients]


def in_flight(wire: Wire) -> list[int]:
    return wire.server.balancers["main"].in_flight


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def test_requests_of_two_processes_go_to_two_replicas() -> None:
    async def main() -> None:
        replicas = [Gate("0"), Gate("1")]
        wire, (first, second) = routers(2, replicas, limit=8)
        tasks = [asyncio.create_task(router.call(key, Gate.answer)) for router, key in ((first, "a"), (second, "b"))]
        await settle()
        assert in_flight(wire) == [1, 1]
        tasks += [asyncio.create_task(second.call("a", Gate.answer)) for _ in range(2)]
        await settle()
        assert in_flight(wire) == [3, 1], "a key stays with its replica, whoever asks"
        tasks.append(asyncio.create_task(first.call("c", Gate.answer)))
        await settle()
        assert in_flight(wire) == [3, 2], "the least busy of all, not of one's own"
        for replica in replicas:
            replica.open.set()
        assert await asyncio.gather(*tasks) == ["0", "1", "0", "0", "1"]
        await settle()
        assert in_flight(wire) == [0, 0]

    asyncio.run(main())


def test_the_bound_of_a_replica_holds_for_all_processes_together() -> None:
    async def main() -> None:
        replicas = [Gate("0"), Gate("1")]
        wire, made = routers(3, replicas, limit=2)
        tasks = [asyncio.create_task(made[n % 3].call(n, Gate.answer)) for n in range(9)]
        await settle()
        assert in_flight(wire) == [2, 2]
        replicas[1].open.set()
        await settle()
        assert in_flight(wire) == [2, 0]
        assert sum(task.done() for task in tasks) == 7, "who waited went where room was"
        replicas[0].open.set()
        await asyncio.gather(*tasks)
        await settle()
        assert in_flight(wire) == [0, 0]

    asyncio.run(main())


def test_many_requests_share_a_message() -> None:
    async def main() -> None:
        replicas = [Gate("0"), Gate("1")]
        for replica in replicas:
            replica.open.set()
        wire, (router,) = routers(1, replicas, limit=1000)
        await asyncio.gather(*(router.call(n, Gate.answer) for n in range(500)))
        assert wire.messages <= 4
        await settle()
        assert in_flight(wire) == [0, 0]

    asyncio.run(main())


def test_whoever_gives_up_waiting_holds_no_lease() -> None:
    async def main() -> None:
        replicas = [Gate("0")]
        wire, (first, second) = routers(2, replicas, limit=1, deadline=0.05)
        held = asyncio.create_task(first.call("a", Gate.answer))
        await settle()
        with pytest.raises(AllReplicasFailed, match=r"no answer within 0.05 s \(all replicas are busy\)"):
            await second.call("b", Gate.answer)
        await asyncio.gather(held, return_exceptions=True)
        await settle()
        assert in_flight(wire) == [0]
        replicas[0].open.set()
        assert await second.call("b", Gate.answer) == "0"

    asyncio.run(main())


def test_a_process_that_dies_leaves_nothing_taken() -> None:
    async def main() -> None:
        replicas = [Gate("0")]
        wire, (first, second) = routers(2, replicas, limit=2)
        lost = [asyncio.create_task(first.call(n, Gate.answer)) for n in range(4)]
        await settle()
        waits = asyncio.create_task(second.call("b", Gate.answer))
        await settle()
        assert in_flight(wire) == [2]
        wire.server.connect("worker 0")  # replaces the one that died
        await settle()
        assert in_flight(wire) == [1], "two leases are released, and the request that waited has one of them"
        replicas[0].open.set()
        assert await waits == "0"
        wire.server.disconnect("worker 1")
        wire.server.disconnect("worker 1")
        assert in_flight(wire) == [0]
        for task in lost:
            task.cancel()

    asyncio.run(main())


def test_without_the_coordinator_nobody_waits_for_ever() -> None:
    async def main() -> None:
        replicas = [Gate("0")]
        wire, (router,) = routers(1, replicas, limit=1)
        tasks = [asyncio.create_task(router.call(n, Gate.answer)) for n in range(3)]
        await settle()
        wire.cut = True
        replicas[0].open.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found[0] == "0"
        for error in (*found[1:], *await asyncio.gather(router.call("new", Gate.answer), return_exceptions=True)):
            assert isinstance(error, UserError)
            assert "lost its coordinator" in str(error)

    asyncio.run(main())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(["answer", "cancel"])), max_size=30),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_leases_are_never_lost_nor_given_twice(
    calls: list[tuple[int, int, str]], count: int, limit: int, chance: random.Random
) -> None:
    """Whatever is asked, answered and cancelled in whatever order."""

    async def main() -> None:
        under_way = [0] * count
        doors: list[asyncio.Event] = []

        class Busy:
            def __init__(self, number: int) -> None:
                self.number = number

            async def serve(self) -> int:
                under_way[self.number] += 1
                assert under_way[self.number] <= limit
                door = asyncio.Event()
                doors.append(door)
                try:
                    await door.wait()
                finally:
                    under_way[self.number] -= 1
                return self.number

        wire = Wire(LoadBalancerServer({"main": count}, limit))
        made = [
            Router("main", [Busy(n) for n in range(count)], wire.client(str(number))["main"]) for number in range(3)
        ]
        tasks = []
        for who, key, fate in calls:
            task = asyncio.create_task(made[who].call(key, Busy.serve))
            tasks.append((task, fate))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            if fate == "cancel" and chance.random() < 0.5:
                task.cancel()
            if doors and chance.random() < 0.5:
                doors.pop(chance.randrange(len(doors))).set()
        while not all(task.done() for task, _ in tasks):
            await settle()
            for task, fate in tasks:
                if fate == "cancel":
                    task.cancel()
            while doors:
                doors.pop().set()
        assert all(fate == "cancel" or not task.cancelled() for task, fate in tasks)
        await settle()
        assert in_flight(wire) == [0] * count

    asyncio.run(main())


# ── the real coordinator ─────────────────────────────────────────────────────────────────────────────────────────────


A = TypeVar("A")


class Asker:
    """A process with a router of its own."""

    def __init__(self, name: str) -> None:
        self.replicas = [Gate("0"), Gate("1")]
        self.router = Router("main", self.replicas, connect_load_balancers(find_coordinator(), name)["main"])
        self.tasks: list[asyncio.Task[str]] = []

    async def begin(self, key: str) -> None:
        self.tasks.append(asyncio.create_task(self.router.call(key, Gate.answer)))

    async def finish(self) -> list[str]:
        for replica in self.replicas:
            replica.open.set()
        return await asyncio.gather(*self.tasks)


class Light(Coordinator):
    async def light(self) -> bool:
        return "torch" not in sys.modules


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes cannot import a test
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.cluster
def test_two_processes_and_a_coordinator(cluster: None) -> None:
    def spawn(kind: type[A], name: str, *args: object) -> ActorHandle[A]:
        return ActorHandle(name, ray.remote(kind).options(name=name, num_cpus=0, max_concurrency=100).remote(*args))

    async def until(wanted: list[int]) -> None:
        async with asyncio.timeout(60):
            while (await coordinator.call(Coordinator.in_flight))["main"] != wanted:
                await asyncio.sleep(0.01)

    async def main() -> None:
        await first.call(Asker.begin, "a")
        await until([1, 0])
        await second.call(Asker.begin, "b")
        await until([1, 1])
        await second.call(Asker.begin, "a")
        await until([2, 1])
        await first.call(Asker.begin, "a")
        await until([2, 2])
        await second.call(Asker.begin, "c")
        assert await first.call(Asker.finish) == ["0", "1"], "the replica of the key is full"
        await until([2, 1])
        ray.kill(second.actor)
        await coordinator.call(Coordinator.disconnect, "second")
        await until([0, 0])
        assert await coordinator.call(Light.light), "the coordinator does not load torch"
        for key in range(5):
            await third.call(Asker.begin, str(key))
        await until([2, 2])
        ray.kill(coordinator.actor)
        with pytest.raises(
            UserError, match=r"the run lost its coordinator; .tutelage resume. goes on .*coordinator died"
        ):
            await third.call(Asker.finish)

    coordinator = spawn(Light, COORDINATOR, {"main": 2}, 2)
    first, second, third = (spawn(Asker, name, name) for name in ("first", "second", "third"))
    asyncio.run(main())
