"""Test the load balancer: the choice of replicas, retries, and sticky prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutelage.errors import ReplicaGone
from tutelage.routing import load_balancer
from tutelage.routing import router as routing
from tutelage.routing.load_balancer import LocalLoadBalancer
from tutelage.routing.router import AllReplicasFailed, Router


class Replica:
    """Answers with its name when it is let go; fails as long as it is told to."""

    def __init__(self, name: str, fails: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.asked = 0
        self.gate = asyncio.Event()

    async def held(self) -> str:
        self.asked += 1
        await self.gate.wait()
        return self.name

    async def answer(self) -> str:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails:
            raise ConnectionError(f"{self.name} is gone")
        return self.name


def replicas(count: int, failing: Sequence[int] = ()) -> list[Replica]:
    return [Replica(str(i), i in failing) for i in range(count)]


def loads(router: Router[Replica]) -> list[int]:
    assert isinstance(router.balancer, LocalLoadBalancer)
    return router.balancer.in_flight


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_call_goes_to_the_replica_with_the_fewest_in_flight() -> None:
    async def main() -> None:
        router = Router("main", replicas(3))
        tasks = [asyncio.create_task(router.call(key, Replica.held)) for key in range(5)]
        await settle()
        assert loads(router) == [2, 2, 1]
        router.replicas[1].gate.set()
        await settle()
        assert loads(router) == [2, 0, 1]
        tasks.append(asyncio.create_task(router.call("next", Replica.held)))
        assert await tasks[-1] == "1"
        for replica in router.replicas:
            replica.gate.set()
        await asyncio.gather(*tasks)
        assert loads(router) == [0, 0, 0]
        assert router.retries == 0

    asyncio.run(main())


def test_a_key_stays_with_its_replica_while_it_runs_and_later() -> None:
    """The samples of a prompt share a prefix where it is cached."""

    async def main() -> None:
        router = Router("main", replicas(3))
        tasks = [asyncio.create_task(router.call(key, Replica.held)) for key in ("a", "a", "b", "a")]
        await settle()
        assert loads(router) == [3, 1, 0]
        for replica in router.replicas:
            replica.gate.set()
        assert await asyncio.gather(*tasks) == ["0", "0", "1", "0"]
        assert await router.call("b", Replica.answer) == "1"
        assert await router.call("c", Replica.answer) == "0"

    asyncio.run(main())


def test_a_failed_call_is_made_again_elsewhere_and_the_key_moves() -> None:
    async def main() -> None:
        router = Router("main", replicas(3, failing=[0]))
        assert await router.call("a", Replica.answer) == "1"
        assert router.retries == 1
        assert await router.call("a", Replica.answer) == "1"
        assert router.retries == 1
        assert [replica.asked for replica in router.replicas] == [1, 2, 0]
        assert loads(router) == [0, 0, 0]

    asyncio.run(main())


def test_the_next_to_be_asked_is_the_least_busy_of_the_others() -> None:
    async def main() -> None:
        router = Router("main", replicas(3))
        router.replicas[0].fails = True
        busy = [asyncio.create_task(router.call(key, Replica.held)) for key in ("x", "y", "z", "w", "v")]
        await settle()
        assert loads(router) == [2, 2, 1]
        assert await router.call("x", Replica.answer) == "2"
        for replica in router.replicas:
            replica.gate.set()
        await asyncio.gather(*busy)

    asyncio.run(main())


def test_when_all_fail_the_error_has_each_reason_once() -> None:
    async def main() -> None:
        router = Router("teacher 'big'", replicas(2, failing=[0, 1]))
        with pytest.raises(AllReplicasFailed) as caught:
            await router.call("a", Replica.answer)
        message = str(caught.value)
        assert message.startswith("teacher 'big': no replica could answer")
        assert "replica 0: ConnectionError: 0 is gone" in message
        assert "replica 1: ConnectionError: 1 is gone" in message
        assert [replica.asked for replica in router.replicas] == [1, 1]
        assert router.retries == 1
        assert loads(router) == [0, 0]
        router.replicas[0].fails = router.replicas[1].fails = False
        assert await router.call("a", Replica.answer) == "0"

    asyncio.run(main())


def test_a_cancelled_call_is_not_made_again_and_is_no_longer_in_flight() -> None:
    async def main() -> None:
        router = Router("main", replicas(2))
        task = asyncio.create_task(router.call("a", Replica.held))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loads(router) == [0, 0]
        assert [replica.asked for replica in router.replicas] == [1, 0]
        assert router.retries == 0

    asyncio.run(main())


def test_only_so_many_keys_are_remembered_and_the_latest_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancer, "REMEMBERED_KEYS", 4)

    async def main() -> None:
        router = Router("main", replicas(2))
        loads(router)[0] = 1  # so that new keys go to replica 1
        for key in range(4):
            assert await router.call(key, Replica.answer) == "1"
        assert await router.call(0, Replica.answer) == "1"  # used again: key 1 is the oldest now
        await router.call(4, Replica.answer)
        loads(router)[:] = [0, 1]  # new keys go to replica 0
        remembered = [0, 2, 3, 4]
        assert [await router.call(key, Replica.answer) for key in remembered] == ["1"] * 4
        assert await router.call(1, Replica.answer) == "0"

    asyncio.run(main())


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 3))), max_size=20))
def test_every_call_is_answered_by_a_sound_replica_or_fails(count: int, calls: list[tuple[int, set[int]]]) -> None:
    async def main() -> None:
        router = Router("main", replicas(count))
        retries = 0
        for key, failing in calls:
            before = [replica.asked for replica in router.replicas]
            for number, replica in enumerate(router.replicas):
                replica.fails = number in failing
            if failing >= set(range(count)):
                with pytest.raises(AllReplicasFailed):
                    await router.call(key, Replica.answer)
            else:
                assert int(await router.call(key, Replica.answer)) not in failing
            made = [replica.asked - n for replica, n in zip(router.replicas, before, strict=True)]
            assert max(made) == 1
            retries += sum(made) - 1
            assert router.retries == retries
            assert loads(router) == [0] * count

    asyncio.run(main())


# ── back pressure, deadlines, replicas that come back ────────────────────────────────────────────────────────────────


def test_a_full_replica_is_passed_over_and_when_all_are_full_the_caller_waits() -> None:
    async def main() -> None:
        router = Router("main", replicas(2), LocalLoadBalancer(2, limit=2))
        tasks = [asyncio.create_task(router.call("same", Replica.held)) for _ in range(6)]
        await settle()
        assert loads(router) == [2, 2], "the key's own replica first, then the other; two callers wait"
        router.replicas[1].gate.set()
        await asyncio.gather(*tasks[2:])
        assert loads(router) == [2, 0], "who waited went to the replica that had room first"
        router.replicas[0].gate.set()
        assert sorted(await asyncio.gather(*tasks)) == ["0", "0", "1", "1", "1", "1"]
        assert loads(router) == [0, 0]
        assert router.retries == 0

    asyncio.run(main())


def test_a_call_that_nobody_answers_in_time_says_so() -> None:
    async def main() -> None:
        router = Router("teacher 'big'", replicas(2), LocalLoadBalancer(2, limit=1), deadline=0.05)
        held = [asyncio.create_task(router.call(n, Replica.held)) for n in range(3)]
        found = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(error, AllReplicasFailed) for error in found)
        assert "teacher 'big': no answer within 0.05 s (all replicas are busy)" in str(found[2])
        assert loads(router) == [0, 0]

    asyncio.run(main())


class Mortal(Replica):
    """Is gone for so many calls, or for good."""

    def __init__(self, name: str, calls: int, for_good: bool = False) -> None:
        super().__init__(name)
        self.calls, self.for_good = calls, for_good

    async def answer(self) -> str:
        self.asked += 1
        if self.asked <= self.calls:
            raise ReplicaGone(f"{self.name} died", self.for_good)
        return self.name


def test_a_replica_that_comes_back_is_waited_for_one_that_does_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "PAUSE", 0.001)

    async def main() -> None:
        router = Router("main", [Mortal("0", 2), Mortal("1", 99, for_good=True)], deadline=10)
        assert await router.call("key", Mortal.answer) == "0"
        assert [replica.asked for replica in router.replicas] == [3, 1]
        assert router.retries == 3
        lost = Router("main", [Mortal("0", 99, for_good=True), Mortal("1", 99, for_good=True)], deadline=10)
        with pytest.raises(AllReplicasFailed, match="replica 0: ReplicaGone: 0 died; replica 1: ReplicaGone: 1 died"):
            await lost.call("key", Mortal.answer)
        hasty = Router("main", [Mortal("0", 99)])
        with pytest.raises(AllReplicasFailed):
            await hasty.call("key", Mortal.answer)
        assert hasty.replicas[0].asked == 1, "without a deadline nobody waits"

    asyncio.run(main())


def test_a_replica_that_says_when_it_is_back_is_asked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(routing.asyncio, "sleep", sleep)
    asked: list[str] = []

    async def ask(replica: str) -> str:
        asked.append(replica)
        if len(asked) <= 2:
            raise ReplicaGone(f"{replica} is busy", after={"a": 7.0, "b": 3.0}[replica])
        return replica

    router = Router("main", ["a", "b"], deadline=60)
    assert asyncio.run(router.call("key", ask)) in ("a", "b")
    assert slept == [3.0], "the shorter of the two pauses"
    assert sorted(asked[:2]) == ["a", "b"]
