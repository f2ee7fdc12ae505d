"""Placement: assigns nodes to every replica of every pool, or refuses with the numbers.

Everything here is pure: it starts nothing and asks no cluster. A replica asks for devices of one kind, so GPUs and CPUs
are two separate bin-packing problems. Replicas that must stay on one node come first, largest first, each on the first
node with room. Where that fails although there are enough devices, a search over all arrangements decides. Replicas
that may straddle nodes take what is left, on one node if possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tutelage.config.schema import PoolSettings
from tutelage.errors import UserError

Device = Literal["cpu", "gpu"]
DEVICES: tuple[Device, ...] = ("gpu", "cpu")

QUEUE_CPUS = 3
"""CPUs of the queue's own actors (a controller and two storage units), on whichever node Ray places them."""
CPUS_PER_GPU = 8
FEWEST_CPUS = 16
"""CPUs of a node where `--cluster` does not give them: so many per GPU, and at least FEWEST_CPUS."""
SEARCHED = 20_000
"""Arrangements that the search tries before it gives up; clusters of some dozens of nodes need far fewer."""
SEARCHED_REPLICAS = 400
"""Replicas up to which the search runs."""


class CannotPlace(UserError):
    """The pools of a recipe do not fit the cluster; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster and its devices."""

    name: str
    cpus: int
    gpus: int = 0

    def devices(self, kind: Device) -> int:
        return self.gpus if kind == "gpu" else self.cpus


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Devices on one node."""

    node: str
    devices: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """The devices that one replica needs."""

    pool: str
    replica: int
    device: Device
    devices: int
    straddle: bool
    """whether its devices may be on several nodes"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one replica runs: one share, or several if it straddles nodes."""

    bundle: Bundle
    shares: tuple[NodeShare, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of all replicas, in the order of pools and replicas."""

    places: tuple[Place, ...]

    def of(self, pool: str) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.bundle.pool == pool)

    def used(self, node: str, kind: Device) -> int:
        """Count the devices of a kind that replicas use on a node."""
        return sum(
            share.devices
            for place in self.places
            if place.bundle.device == kind
            for share in place.shares
            if share.node == node
        )


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process of a run is, as it says itself."""

    node: str
    """IP address of the machine"""
    device: Device
    devices: tuple[str, ...]
    """ids of the GPUs that it sees; the CPUs of a replica have none"""
    cpus: int = 0
    """CPUs of its replica"""


def placement_lines(members: Mapping[str, Sequence[ProcessPlace]]) -> Iterable[str]:
    """Yield one line for each member: its nodes, and the devices of its processes there."""
    for member, places in members.items():
        nodes: dict[str, list[str]] = {}
        for where in places:
            held = (
                f"GPU {', '.join(where.devices)}" if where.device == "gpu" else f"{where.cpus} CPU{plural(where.cpus)}"
            )
            nodes.setdefault(where.node, []).append(held)
        count = f"{len(places)} process{'es' if len(places) > 1 else ''}"
        yield f"placement: {member}, {count}: " + "; ".join(
            f"{node} ({_counted(held)})" for node, held in nodes.items()
        )


def _counted(held: Sequence[str]) -> str:
    """Format equal entries as `4 × 1 CPU`."""
    counts = {each: held.count(each) for each in held}
    return ", ".join(each if count == 1 else f"{count} × {each}" for each, count in counts.items())


def bundles(pools: Mapping[str, PoolSettings]) -> tuple[Bundle, ...]:
    """Return the bundles of all replicas of all pools."""
    return tuple(
        Bundle(name, replica, pool.device, pool.devices, pool.straddle)
        for name, pool in pools.items()
        for replica in range(pool.replicas)
    )


def left_for_pools(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes without the CPUs that the queue may need there."""
    return tuple(replace(node, cpus=max(node.cpus - QUEUE_CPUS, 0)) for node in nodes)


def place(pools: Mapping[str, PoolSettings], nodes: Sequence[Node]) -> Placement:
    """Assign every replica to nodes, all of which are free. Raises CannotPlace with the numbers if they do not fit."""
    asked, found, refused = bundles(pools), dict[Bundle, Place](), list[Device]()
    for kind in DEVICES:
        places = _assign([bundle for bundle in asked if bundle.device == kind], nodes)
        if places is None:
            refused.append(kind)
        else:
            found.update((place.bundle, place) for place in places)
    if refused:
        lines = [line for kind in refused for line in _reasons(kind, pools, nodes)]
        raise CannotPlace("the pools do not fit the cluster:\n  " + "\n  ".join(lines))
    return Placement(tuple(found[bundle] for bundle in asked))


def describe_cluster(text: str) -> tuple[Node, ...]:
    """Parse a description such as `nodes=4,gpus=8` or `nodes=2,gpus=0,cpus=32` into equal nodes."""
    given: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = (part.strip() for part in word.partition("="))
        if name not in ("nodes", "gpus", "cpus") or name in given or not number.isdecimal() or len(number) > 6:
            raise UserError(f"--cluster {text}: {word!r} is not understood; expected e.g. nodes=4,gpus=8 or ,cpus=64")
        given[name] = int(number)
    if given.get("nodes", 0) < 1:
        raise UserError(f"--cluster {text}: it needs nodes=N with at least one node, e.g. nodes=4,gpus=8")
    gpus = given.get("gpus", 0)
    cpus = given.get("cpus", max(CPUS_PER_GPU * gpus, FEWEST_CPUS))
    return tuple(Node(f"node {number}", cpus, gpus) for number in range(given["nodes"]))


def _assign(asked: Sequence[Bundle], nodes: Sequence[Node]) -> list[Place] | None:
    """Place bundles of one device kind; None if they do not fit."""
    if not asked:
        return []
    free = [node.devices(asked[0].device) for node in nodes]
    if sum(bundle.devices for bundle in asked) > sum(free):
        return None
    rigid = sorted((b for b in asked if not b.straddle), key=lambda bundle: -bundle.devices)
    chosen = _pack([bundle.devices for bundle in rigid], free)
    if chosen is None:
        return None
    places: list[Place] = []
    for bundle, node in zip(rigid, chosen, strict=True):
        free[node] -= bundle.devices
        places.append(Place(bundle, (NodeShare(nodes[node].name, bundle.devices),)))
    for bundle in sorted((b for b in asked if b.straddle), key=lambda bundle: -bundle.devices):
        taken = _take(bundle.devices, free)
        places.append(Place(bundle, tuple(NodeShare(nodes[node].name, count) for node, count in taken)))
    return places


def _pack(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """Return a node for each size (largest first): the first with room, else by a search; None if nothing fits."""
    left, chosen = list(free), list[int]()
    for size in sizes:
        node = next((number for number, room in enumerate(left) if room >= size), None)
        if node is None:
            return _search(sizes, free)
        left[node] -= size
        chosen.append(node)
    return chosen


def _search(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """Search depth first, largest replica first. Nodes with equal room are interchangeable, and states that failed are
    not visited again, so the number of states stays small."""
    left, chosen, failed = list(free), list[int](), set[tuple[int, tuple[int, ...]]]()

    def fits(index: int) -> bool:
        if index == len(sizes):
            return True
        state = index, tuple(sorted(left))
        if state in failed or len(failed) >= SEARCHED:
            return False
        for node in {room: number for number, room in enumerate(left) if room >= sizes[index]}.values():
            left[node] -= sizes[index]
            chosen.append(node)
            if fits(index + 1):
                return True
            chosen.pop()
            left[node] += sizes[index]
        failed.add(state)
        return False

    return chosen if len(sizes) <= SEARCHED_REPLICAS and fits(0) else None


def _take(devices: int, free: list[int]) -> list[tuple[int, int]]:
    """Take devices for one replica out of `free`: from the emptiest node, then from others if it has too few."""
    taken: list[tuple[int, int]] = []
    for number in sorted(range(len(free)), key=lambda number: -free[number]):
        count = min(devices, free[number])
        if count:
            free[number] -= count
            devices -= count
            taken.append((number, count))
    return taken


def _reasons(kind: Device, pools: Mapping[str, PoolSettings], nodes: Sequence[Node]) -> Iterable[str]:
    """Explain what is asked and what is available, by pool."""
    unit, offers = kind.upper(), [node.devices(kind) for node in nodes]
    wanted = {name: pool for name, pool in pools.items() if pool.device == kind}
    asked = sum(pool.replicas * pool.devices for pool in wanted.values())
    yield f"{unit}s: {asked} asked, {sum(offers)} available ({summary(offers, unit)})"
    for name, pool in wanted.items():
        total = pool.replicas * pool.devices
        yield f"  pool {name}: {total} {unit}{plural(total)} ({size(pool)})"
    if asked > sum(offers):
        yield f"  lower pools.NAME.replicas or pools.NAME.devices, or give the cluster {asked - sum(offers)} more"
        return
    for name, pool in wanted.items():
        if not pool.straddle and pool.devices > max(offers, default=0):
            yield f"  no node has the {pool.devices} {unit}s that a replica of pools.{name} asks for"
    yield (
        "  there are enough of them, but no way was found to keep every replica on one node: lower pools.NAME.devices, "
        "or set pools.NAME.straddle to true for replicas that may span nodes"
    )


def summary(offers: Sequence[int], unit: str) -> str:
    """Format as `4 nodes with 8 GPUs`, or node by node where they differ."""
    if len(set(offers)) == 1:
        return f"{len(offers)} node{plural(len(offers))} with {offers[0]} {unit}{plural(offers[0])}"
    return f"{len(offers)} nodes with {', '.join(map(str, offers))} {unit}s"


def size(pool: PoolSettings) -> str:
    """Format as `2 × 4 GPUs`: replicas × devices."""
    return f"{pool.replicas} × {pool.devices} {pool.device.upper()}{plural(pool.devices)}"


def plural(count: int) -> str:
    return "" if count == 1 else "s"
