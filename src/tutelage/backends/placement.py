"""Pools and nodes in, a place for every replica out; or a refusal with the numbers. Pure: nothing is started or asked.

A replica asks for devices of one kind, so GPUs and CPUs are two separate questions, each a matter of packing. Replicas
that must not straddle come first, largest first, each on the first node with room. Where that fails although there are
devices enough, a search over all ways to pack decides. Replicas that may straddle take what is left, on one node if
they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tutelage.backends.places import DEVICES, Bundle, CannotPlace, Device, Node, Place, Placement, Share
from tutelage.config.schema import Pool
from tutelage.errors import UserError

QUEUE_CPUS = 3
"""CPUs that the queue's own actors take (a controller and two storage units), on whichever node they end up."""
CPUS_PER_GPU = 8
FEWEST_CPUS = 16
"""What a node of a described cluster has if nothing is said of CPUs: so many per GPU, and at least so many."""
SEARCHED = 20_000
"""Arrangements that the search looks at before it gives up, far beyond what clusters of some dozens of nodes need."""
SEARCHED_REPLICAS = 400
"""The search takes no more replicas than this."""


def bundles(pools: Mapping[str, Pool]) -> tuple[Bundle, ...]:
    """What every replica of every pool asks for."""
    return tuple(
        Bundle(name, replica, pool.device, pool.devices, pool.straddle)
        for name, pool in pools.items()
        for replica in range(pool.replicas)
    )


def left_for_pools(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes without the CPUs that the queue may need there."""
    return tuple(replace(node, cpus=max(node.cpus - QUEUE_CPUS, 0)) for node in nodes)


def place(pools: Mapping[str, Pool], nodes: Sequence[Node]) -> Placement:
    """Where every replica goes on nodes that are free. Raises CannotPlace with what is asked and what there is."""
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
    """The equal nodes of `nodes=4,gpus=8` or `nodes=2,gpus=0,cpus=32`."""
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
    """Places of bundles of one kind; None if there are none."""
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
        places.append(Place(bundle, (Share(nodes[node].name, bundle.devices),)))
    for bundle in sorted((b for b in asked if b.straddle), key=lambda bundle: -bundle.devices):
        taken = _take(bundle.devices, free)
        places.append(Place(bundle, tuple(Share(nodes[node].name, count) for node, count in taken)))
    return places


def _pack(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """The node of each size (largest first): the first with room, or what a search finds; None if nothing fits."""
    left, chosen = list(free), list[int]()
    for size in sizes:
        node = next((number for number, room in enumerate(left) if room >= size), None)
        if node is None:
            return _search(sizes, free)
        left[node] -= size
        chosen.append(node)
    return chosen


def _search(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """Try nodes in turn, largest replica first. Nodes with equal room are alike, and what failed once is not tried
    again, so the number of states stays small."""
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
    """Devices for one replica, taken out of `free`: of the emptiest node, and of further ones if it has too few."""
    taken: list[tuple[int, int]] = []
    for number in sorted(range(len(free)), key=lambda number: -free[number]):
        count = min(devices, free[number])
        if count:
            free[number] -= count
            devices -= count
            taken.append((number, count))
    return taken


def _reasons(kind: Device, pools: Mapping[str, Pool], nodes: Sequence[Node]) -> Iterable[str]:
    """Asked and available, by pool."""
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
    """`4 nodes with 8 GPUs`, or node by node where they differ."""
    if len(set(offers)) == 1:
        return f"{len(offers)} node{plural(len(offers))} with {offers[0]} {unit}{plural(offers[0])}"
    return f"{len(offers)} nodes with {', '.join(map(str, offers))} {unit}s"


def size(pool: Pool) -> str:
    """`2 × 4 GPUs`: replicas × devices."""
    return f"{pool.replicas} × {pool.devices} {pool.device.upper()}{plural(pool.devices)}"


def plural(count: int) -> str:
    return "" if count == 1 else "s"
