"""Test processes on a cluster of two nodes, and concurrent calls: failures are raised, late processes are named."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as Nodes
from ray.exceptions import ActorDiedError

from tutelage.backends.placement import QUEUE_CPUS
from tutelage.backends.ray.cluster import ActorSpec, Cluster, gpu_ids
from tutelage.backends.ray.faults import all_within, needing
from tutelage.backends.ray.handles import ActorHandle
from tutelage.config.schema import PoolSettings, RaySettings
from tutelage.data.trajectory import Key
from tutelage.errors import ReplicaGone, RunLost, UserError
from tutelage.learner.update import NonFiniteLoss


async def soon() -> None:
    await asyncio.sleep(0)


async def never() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise ValueError("out of memory")


def test_whoever_is_late_is_named() -> None:
    calls = {"student, replica 0": soon, "student, replica 1": never, "student, replica 2": never}
    with pytest.raises(UserError) as raised:
        asyncio.run(all_within({name: call() for name, call in calls.items()}, 0.05, "publishing version 7"))
    assert str(raised.value) == (
        "publishing version 7 did not finish within 0.05 s: no answer from student, replica 1, student, replica 2"
    )


def test_an_error_ends_the_waiting_at_once() -> None:
    with pytest.raises(ValueError, match="out of memory"):
        asyncio.run(all_within({"a": never(), "b": fails()}, 60, "starting"))
    asyncio.run(all_within({"a": soon(), "b": soon()}, 60, "starting"))


def test_errors_travel_whole() -> None:
    gone = pickle.loads(pickle.dumps(ReplicaGone("teacher 'a', replica 0 died", for_good=True)))
    assert (str(gone), gone.for_good) == ("teacher 'a', replica 0 died", True)
    keys = (Key("train", 1, 0, 0, 0),)
    loss = pickle.loads(pickle.dumps(NonFiniteLoss("the loss is not finite", keys)))
    assert (str(loss), loss.keys) == ("the loss is not finite", keys)


# ── processes that a run cannot do without ───────────────────────────────────────────────────────────────────────────


class Actor:
    """An actor that answers until it has died, or says nothing any longer."""

    def __init__(self) -> None:
        self.dead, self.silent, self.killed = False, False, False

    @property
    def __ray_ready__(self) -> Actor:
        return self

    async def remote(self) -> bool:
        if self.silent:
            await never()
        if self.dead:
            raise ActorDiedError
        return True


async def needed(actor: Actor, inside: Callable[[Actor], Awaitable[None]], deadline: float = 60.0) -> list[str]:
    """`inside`, with the actor needed; returns what was released."""
    released: list[str] = []
    actors: list[ActorHandle[Any]] = [ActorHandle("the coordinator", Actor()), ActorHandle("the ledger", actor)]
    async with needing(actors, deadline, lambda: released.append("all"), "It is needed."):
        await inside(actor)
    return released


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    found: list[Actor] = []
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr("tutelage.backends.ray.faults.PERIOD", 0.02)
    return found


async def dies(actor: Actor) -> None:
    actor.dead = True
    await never()


async def falls_silent(actor: Actor) -> None:
    actor.silent = True
    await never()


async def dies_and_is_asked(actor: Actor) -> None:
    actor.dead = True
    raise ValueError("no answer from the ledger")


async def dies_while_it_must_not_be_left(actor: Actor) -> None:
    actor.dead = True
    for _ in range(3):
        with suppress(asyncio.CancelledError):
            await never()
    await never()


@pytest.mark.parametrize("inside", [dies, dies_and_is_asked, dies_while_it_must_not_be_left])
def test_what_needs_a_process_ends_when_it_dies(inside: Any, killed: list[Actor]) -> None:
    async def test() -> None:
        with pytest.raises(RunLost, match=r"^the ledger died and will not be started again: .*\nIt is needed\.$"):
            await asyncio.wait_for(needed(Actor(), inside), 30)
        await soon()
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        assert len(asyncio.all_tasks()) == 1, "nothing goes on watching"

    asyncio.run(test())
    assert killed == []


def test_a_process_that_says_nothing_is_ended_after_the_deadline(killed: list[Actor]) -> None:
    actor = Actor()
    with pytest.raises(RunLost, match=r"^the ledger has not answered for 0\.2 s\nIt is needed\.$"):
        asyncio.run(asyncio.wait_for(needed(actor, falls_silent, 0.2), 30))
    assert killed == [actor]


def test_errors_and_cancellations_that_are_nobodys_death_stay_what_they_are(killed: list[Actor]) -> None:
    async def wrong(actor: Actor) -> None:
        raise ValueError("out of memory")

    async def test() -> None:
        assert await needed(Actor(), lambda actor: soon()) == []
        with pytest.raises(ValueError, match="out of memory"):
            await needed(Actor(), wrong)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(needed(Actor(), lambda actor: never()), 0.05)

    asyncio.run(test())


def test_without_an_address_a_local_cluster_starts_whatever_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With None, Ray would join the cluster that RAY_ADDRESS names or that it finds on this machine."""
    asked: list[Any] = []

    def init(address: str | None = None, **options: Any) -> None:
        asked.append(address)
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    for address in (None, "auto"):
        with pytest.raises(ConnectionError):
            Cluster(RaySettings(address=address), {})
    assert asked == ["local", "auto"]


# ── a cluster ────────────────────────────────────────────────────────────────────────────────────────────────────────

POOLS = {
    "small": PoolSettings(replicas=3),
    "large": PoolSettings(devices=3),
    "wide": PoolSettings(devices=4, straddle=True),
    "seeing": PoolSettings(replicas=2, device="gpu"),
}


class Located:
    """Says where it is."""

    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    async def given(self) -> tuple[str, ...]:
        return gpu_ids()


class Unwilling:
    def __init__(self) -> None:
        raise UserError("the model is not there")

    async def node(self) -> None: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes that call themselves so; one says that it has two GPUs. Replicas fill both to the last device."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes cannot import a test
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 4 + QUEUE_CPUS, "include_dashboard": False})
    nodes.add_node(num_cpus=6 + QUEUE_CPUS, num_gpus=2)
    try:
        found = Cluster(RaySettings(address=nodes.address), POOLS)
        yield found
        found.close()
    finally:
        nodes.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.cluster
def test_replicas_live_on_the_nodes_that_were_chosen_for_them_and_see_their_gpus(cluster: Cluster) -> None:
    assert len({share.node for where in cluster.placement.places for share in where.shares}) == 2
    actors = {
        (where.bundle.pool, where.bundle.replica): cluster.spawn(
            ActorSpec("actor", where.bundle.pool, where.bundle.replica), Located
        )
        for where in cluster.placement.places
    }
    for where in cluster.placement.places:
        lives = actors[where.bundle.pool, where.bundle.replica].call_sync(Located.node)
        assert where.bundle.straddle or [lives] == [share.node for share in where.shares]
    assert sorted(actors["seeing", replica].call_sync(Located.gpus) for replica in range(2)) == ["0", "1"]
    assert sorted(actors["seeing", replica].call_sync(Located.given) for replica in range(2)) == [("0",), ("1",)]
    assert actors["large", 0].call_sync(Located.given) == ()


@pytest.mark.slow
@pytest.mark.cluster
def test_whoever_cannot_start_says_why(cluster: Cluster) -> None:
    actor = cluster.spawn(ActorSpec("student, replica 0"), Unwilling)
    with pytest.raises(ReplicaGone, match=r"student, replica 0 could not start: .*the model is not there$") as raised:
        actor.call_sync(Unwilling.node)
    assert raised.value.for_good
