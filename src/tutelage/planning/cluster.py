"""The cluster part of a plan: the placement of replicas and the memory of one device of each pool.

Sizes are estimates based on the config files of models. They assume that trained weights are split evenly over the
learner's ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tutelage.backends.placement import (
    DEVICES,
    QUEUE_CPUS,
    CannotPlace,
    Node,
    Place,
    left_for_pools,
    place,
    size,
    summary,
)
from tutelage.config.pools import pool_members
from tutelage.config.schema import PoolSettings
from tutelage.planning.contract import Planner
from tutelage.planning.memory import Item, readable


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool with its members, their places, and the memory of one of its devices."""

    name: str
    members: tuple[str, ...]
    settings: PoolSettings
    places: tuple[Place, ...]
    """The places of its replicas; empty if the cluster is unknown or too small."""
    memory: tuple[Item, ...]
    """The memory of one device."""

    @property
    def per_device(self) -> int:
        return sum(item.bytes or 0 for item in self.memory)

    @property
    def where(self) -> str:
        """The number of devices on each node, as text."""
        taken: Counter[str] = Counter()
        for share in (share for where in self.places for share in where.shares):
            taken[share.node] += share.devices
        return ", ".join(f"{node}: {count}" for node, count in taken.items()) or "nowhere yet"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    pools: tuple[PlannedPool, ...]
    nodes: tuple[Node, ...] | None
    """The nodes of the cluster; None for an existing cluster, which is not queried."""
    refusal: str | None
    """Why the pools do not fit, or None."""

    def as_json(self) -> dict[str, Any]:
        """Return everything that is printed. Sizes are in bytes; null is unknown."""
        pools = [
            {
                "name": pool.name,
                "members": pool.members,
                **pool.settings.model_dump(),
                "places": [[asdict(share) for share in where.shares] for where in pool.places],
                "memory": [asdict(item) for item in pool.memory],
                "per_device": pool.per_device,
            }
            for pool in self.pools
        ]
        nodes = None if self.nodes is None else [asdict(node) for node in self.nodes]
        return {"pools": pools, "nodes": nodes, "refusal": self.refusal}


def plan_cluster(planner: Planner, nodes: Sequence[Node] | None) -> ClusterPlan:
    """Place the pools on these nodes or, without nodes, on this machine if the recipe starts a local cluster."""
    config = planner.config
    if nodes is None and config.ray.address is None:
        nodes = [Node("this machine", config.ray.cpus, torch.cuda.device_count())]
    places: tuple[Place, ...] = ()
    refusal: str | None = None
    if nodes is not None:
        try:
            places = place(config.pools, left_for_pools(nodes)).places
        except CannotPlace as error:
            refusal = str(error)
    members = pool_members(config)
    pools = [
        PlannedPool(
            name,
            tuple(member.name for member in members if member.pool == name),
            pool,
            tuple(where for where in places if where.bundle.pool == name),
            tuple(item for m in members if m.pool == name for item in planner.on_device(m, pool)),
        )
        for name, pool in config.pools.items()
    ]
    return ClusterPlan(tuple(pools), None if nodes is None else tuple(nodes), refusal)


def show_cluster(planned: ClusterPlan, console: Console) -> None:
    """Print the placement, the memory per device, requested and available devices, and why the pools do not fit."""
    console.print(_placement_table(planned))
    for line in _totals(planned):
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_memory_table(planned))
    if planned.refusal is not None:
        console.print(Text(planned.refusal, style="bold red"), soft_wrap=True)


def _placement_table(planned: ClusterPlan) -> Table:
    table = _table("pool", "members", "replicas × devices", "devices on nodes")
    table.add_column("memory per device", justify="right", no_wrap=True)
    for pool in planned.pools:
        held = (
            "no model"
            if not pool.memory
            else ("at least " if _unknown(pool.memory) else "") + readable(pool.per_device)
        )
        table.add_row(
            *(Text(cell) for cell in (pool.name, ", ".join(pool.members), size(pool.settings), pool.where, held))
        )
    return table


def _memory_table(planned: ClusterPlan) -> Table:
    table = _table("pool", "memory of a device")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("how it was counted", ratio=1)
    for pool in planned.pools:
        for item in pool.memory:
            taken = "unknown" if item.bytes is None else readable(item.bytes)
            table.add_row(*(Text(cell) for cell in (pool.name, item.name, taken, item.how)))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _totals(planned: ClusterPlan) -> Iterator[str]:
    for kind in DEVICES:
        asked = sum(p.settings.replicas * p.settings.devices for p in planned.pools if p.settings.device == kind)
        unit = kind.upper()
        if kind == "gpu" and not asked:
            continue
        if planned.nodes is None:
            yield f"{unit}s: {asked} asked; what the cluster has is not known here: try --cluster nodes=N,gpus=N"
            continue
        offers = [node.devices(kind) for node in left_for_pools(planned.nodes)]
        kept = f", {QUEUE_CPUS} of each node kept for the queue" if kind == "cpu" else ""
        yield f"{unit}s: {asked} asked, {sum(offers)} available ({summary(offers, unit)}{kept})"


def _unknown(items: Iterable[Item]) -> bool:
    return any(item.bytes is None for item in items)
