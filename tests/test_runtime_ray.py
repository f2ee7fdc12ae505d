"""Processes on a cluster of two nodes, and calls to several at once: who fails is heard, who is late is named."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster as Nodes

from understudy.config.schema import Pool
from understudy.config.schema import Ray as Settings
from understudy.data.trajectory import Key
from understudy.errors import UserError
from understudy.learner.update import NonFiniteLoss
from understudy.runtime.contract import ReplicaGone
from understudy.runtime.placement import QUEUE_CPUS
from understudy.runtime.ray import Cluster, all_within


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


POOLS = {
    "small": Pool(replicas=3),
    "large": Pool(devices=3),
    "wide": Pool(devices=4, straddle=True),
    "seeing": Pool(replicas=2, device="gpu"),
}


class Guest:
    """Says where it is."""

    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


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
        found = Cluster(Settings(address=nodes.address), POOLS)
        yield found
        found.close()
    finally:
        nodes.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_replicas_live_on_the_nodes_that_were_chosen_for_them_and_see_their_gpus(cluster: Cluster) -> None:
    assert len({share.node for where in cluster.placement.places for share in where.shares}) == 2
    guests = {
        (where.bundle.pool, where.bundle.replica): cluster.spawn(
            Guest, "guest", where.bundle.pool, where.bundle.replica
        )
        for where in cluster.placement.places
    }
    for where in cluster.placement.places:
        lives = guests[where.bundle.pool, where.bundle.replica].ask("node")
        assert where.bundle.straddle or [lives] == [share.node for share in where.shares]
    assert sorted(guests["seeing", replica].ask("gpus") for replica in range(2)) == ["0", "1"]


def test_whoever_cannot_start_says_why(cluster: Cluster) -> None:
    guest = cluster.spawn(Unwilling, "student, replica 0", None, 0)
    with pytest.raises(ReplicaGone, match=r"student, replica 0 could not start: .*the model is not there$") as raised:
        guest.ask("node")
    assert raised.value.for_good
