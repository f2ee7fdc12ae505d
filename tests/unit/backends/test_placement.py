"""Test the placement of replicas: no device is used twice, none straddles unasked, refusals are right."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutelage.backends import placement
from tutelage.backends.placement import (
    DEVICES,
    QUEUE_CPUS,
    CannotPlace,
    Node,
    Placement,
    ProcessPlace,
    bundles,
    describe_cluster,
    left_for_pools,
    place,
    placement_lines,
)
from tutelage.config.schema import PoolSettings
from tutelage.errors import UserError

POOL = st.builds(
    PoolSettings,
    replicas=st.integers(1, 3),
    devices=st.integers(1, 5),
    device=st.sampled_from(["cpu", "gpu"]),
    straddle=st.booleans(),
)
POOLS = st.lists(POOL, max_size=4).map(lambda pools: {f"pool {number}": pool for number, pool in enumerate(pools)})
NODES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4).map(
    lambda sizes: [Node(f"n{number}", cpus, gpus) for number, (cpus, gpus) in enumerate(sizes)]
)


def gpus(*counts: int) -> list[Node]:
    return [Node(f"n{number}", cpus=0, gpus=count) for number, count in enumerate(counts)]


def check(found: Placement, pools: dict[str, PoolSettings], nodes: list[Node]) -> None:
    """The promises of a placement, counted afresh."""
    assert [place.bundle for place in found.places] == list(bundles(pools))
    for kind in DEVICES:
        for node in nodes:
            taken = [
                s.devices for p in found.places if p.bundle.device == kind for s in p.shares if s.node == node.name
            ]
            assert sum(taken) == found.used(node.name, kind) <= node.devices(kind)
    for where in found.places:
        assert sum(share.devices for share in where.shares) == where.bundle.devices
        assert all(share.devices > 0 for share in where.shares)
        assert len({share.node for share in where.shares}) == len(where.shares)
        assert len(where.shares) == 1 or where.bundle.straddle


@settings(max_examples=300, deadline=None)
@given(pools=POOLS, nodes=NODES)
def test_nothing_is_promised_twice_and_nothing_straddles_unasked(
    pools: dict[str, PoolSettings], nodes: list[Node]
) -> None:
    try:
        found = place(pools, nodes)
    except CannotPlace:
        return
    check(found, pools, nodes)


def possible(sizes: list[int], free: tuple[int, ...]) -> bool:
    """Every way to give each size a node, one after the other."""
    for chosen in product(range(len(free)), repeat=len(sizes)):
        left = list(free)
        for size, node in zip(sizes, chosen, strict=True):
            left[node] -= size
        if min(left) >= 0:
            return True
    return False


@settings(max_examples=400, deadline=None)
@given(
    rigid=st.lists(st.integers(1, 5), max_size=5),
    loose=st.lists(st.integers(1, 7), max_size=2),
    free=st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple),
)
def test_it_refuses_exactly_what_cannot_be(rigid: list[int], loose: list[int], free: tuple[int, ...]) -> None:
    pools = {f"r{i}": PoolSettings(devices=size, device="gpu") for i, size in enumerate(rigid)}
    pools |= {f"s{i}": PoolSettings(devices=size, device="gpu", straddle=True) for i, size in enumerate(loose)}
    nodes = gpus(*free)
    if sum(rigid) + sum(loose) <= sum(free) and possible(rigid, free):
        check(place(pools, nodes), pools, nodes)
    else:
        with pytest.raises(CannotPlace, match=rf"GPUs: {sum(rigid) + sum(loose)} asked, {sum(free)} available"):
            place(pools, nodes)


@settings(max_examples=400, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=6).map(lambda found: sorted(found, reverse=True)),
    cuts=st.lists(st.integers(0, 5), max_size=2),
    spare=st.integers(-1, 1),
)
def test_the_search_is_exact(sizes: list[int], cuts: list[int], spare: int) -> None:
    """On nodes with hardly more room than is asked for, where most first choices are wrong."""
    ends = sorted({0, *(min(cut, len(sizes)) for cut in cuts), len(sizes)})
    shuffled = sizes[::2] + sizes[1::2]
    free = tuple(sum(shuffled[start:end]) for start, end in pairwise(ends))
    free = (max(free[0] + spare, 0), *free[1:])
    found = placement._search(sizes, free)
    assert (found is not None) == possible(sizes, free)
    if found is not None:
        for node, room in enumerate(free):
            assert sum(size for size, chosen in zip(sizes, found, strict=True) if chosen == node) <= room


@pytest.mark.parametrize(("sizes", "room"), [((4, 4, 3, 3, 3, 3), 10), ((5, 5, 4, 4, 3, 3), 12)])
def test_the_search_finds_what_largest_first_misses(
    sizes: tuple[int, ...], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {str(number): PoolSettings(devices=size, device="gpu") for number, size in enumerate(sizes)}
    check(place(pools, gpus(room, room)), pools, gpus(room, room))
    monkeypatch.setattr(placement, "_search", lambda sizes, free: None)
    with pytest.raises(CannotPlace):
        place(pools, gpus(room, room))


def test_many_replicas_are_placed_at_once() -> None:
    pools = {"a": PoolSettings(replicas=96, devices=4, device="gpu"), "b": PoolSettings(replicas=128, device="gpu")}
    check(place(pools, gpus(*[8] * 64)), pools, gpus(*[8] * 64))
    with pytest.raises(CannotPlace, match="513 asked, 512 available"):
        place({**pools, "c": PoolSettings(device="gpu")}, gpus(*[8] * 64))
    with pytest.raises(CannotPlace, match="no way was found"):
        place({"a": PoolSettings(replicas=100, devices=5, device="gpu")}, gpus(*[8] * 64))


def test_who_may_straddle_stays_together_where_there_is_room() -> None:
    pools = {
        "wide": PoolSettings(devices=4, device="gpu", straddle=True),
        "narrow": PoolSettings(devices=5, device="gpu"),
    }
    [wide] = place(pools, gpus(3, 5, 4)).of("wide")
    assert [(share.node, share.devices) for share in wide.shares] == [("n2", 4)]
    [wide] = place(pools, gpus(3, 6, 2)).of("wide")
    assert [(share.node, share.devices) for share in wide.shares] == [("n0", 3), ("n2", 1)]


def test_a_refusal_has_the_numbers_by_pool_and_kind() -> None:
    pools = {
        "student": PoolSettings(replicas=2, device="gpu"),
        "learner": PoolSettings(replicas=4, device="gpu"),
        "big": PoolSettings(devices=2, device="gpu"),
        "rewards": PoolSettings(replicas=40),
    }
    with pytest.raises(CannotPlace) as caught:
        place(pools, [Node("a", cpus=32, gpus=4)])
    assert str(caught.value) == (
        "the pools do not fit the cluster:\n"
        "  GPUs: 8 asked, 4 available (1 node with 4 GPUs)\n"
        "    pool student: 2 GPUs (2 × 1 GPU)\n"
        "    pool learner: 4 GPUs (4 × 1 GPU)\n"
        "    pool big: 2 GPUs (1 × 2 GPUs)\n"
        "    lower pools.NAME.replicas or pools.NAME.devices, or give the cluster 4 more\n"
        "  CPUs: 40 asked, 32 available (1 node with 32 CPUs)\n"
        "    pool rewards: 40 CPUs (40 × 1 CPU)\n"
        "    lower pools.NAME.replicas or pools.NAME.devices, or give the cluster 8 more"
    )


def test_a_replica_larger_than_a_node_is_named() -> None:
    pools = {"big": PoolSettings(devices=6, device="gpu")}
    with pytest.raises(CannotPlace) as caught:
        place(pools, gpus(4, 5))
    assert "GPUs: 6 asked, 9 available (2 nodes with 4, 5 GPUs)" in str(caught.value)
    assert "no node has the 6 GPUs that a replica of pools.big asks for" in str(caught.value)
    assert "pools.NAME.straddle" in str(caught.value)
    [big] = place({"big": PoolSettings(devices=6, device="gpu", straddle=True)}, gpus(4, 5)).places
    assert [(share.node, share.devices) for share in big.shares] == [("n1", 5), ("n0", 1)]


def test_a_cluster_in_words() -> None:
    assert describe_cluster("nodes=2,gpus=8") == (Node("node 0", 64, 8), Node("node 1", 64, 8))
    assert describe_cluster("nodes=1") == (Node("node 0", 16, 0),)
    assert describe_cluster("gpus=1, cpus=4 ,nodes=1") == (Node("node 0", 4, 1),)


@pytest.mark.parametrize(
    "text", ["", "4", "nodes=0", "gpus=8", "nodes=x", "nodes=1,nodes=2", "nodes=1,tpus=3", "nodes="]
)
def test_a_cluster_that_is_not_understood(text: str) -> None:
    with pytest.raises(UserError, match=r"nodes=4,gpus=8"):
        describe_cluster(text)


def test_the_queue_keeps_its_cpus() -> None:
    assert left_for_pools([Node("a", 16, 2), Node("b", 1)]) == (Node("a", 16 - QUEUE_CPUS, 2), Node("b", 0))


def test_placing_needs_neither_ray_nor_torch() -> None:
    code = "import sys, tutelage.backends.placement\nsys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_where_processes_are_is_one_line_for_each_member() -> None:
    worker = ProcessPlace("10.0.0.1", "cpu", (), 2)
    places = {
        "student": [ProcessPlace("10.0.0.1", "gpu", ("0",)), ProcessPlace("10.0.0.1", "gpu", ("1",))],
        "teacher big": [ProcessPlace("10.0.0.2", "gpu", ("0",)), ProcessPlace("10.0.0.3", "gpu", ("0", "1"))],
        "agent loops": [worker, worker, ProcessPlace("10.0.0.2", "cpu", (), 1)],
        "learner": [ProcessPlace("10.0.0.2", "gpu", ("7",))],
    }
    assert list(placement_lines(places)) == [
        "placement: student, 2 processes: 10.0.0.1 (GPU 0, GPU 1)",
        "placement: teacher big, 2 processes: 10.0.0.2 (GPU 0); 10.0.0.3 (GPU 0, 1)",
        "placement: agent loops, 3 processes: 10.0.0.1 (2 × 2 CPUs); 10.0.0.2 (1 CPU)",
        "placement: learner, 1 process: 10.0.0.2 (GPU 7)",
    ]
