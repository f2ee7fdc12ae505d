"""The cluster part of a plan: the placement of replicas and the memory of one device of each pool.

Sizes are estimates based on config.json. They assume that an engine with several devices splits its model evenly over
them, and that trained weights are split evenly over the learner's ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tutelage.algorithms.contract import Algorithm
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
from tutelage.config.pools import Member, pool_members
from tutelage.config.schema import Config, PoolSettings
from tutelage.modality.text_models import PREFIX_TOKENS
from tutelage.models.sizes import Sizes, Weights
from tutelage.planning.memory import (
    Item,
    activations,
    critic_bytes,
    logits,
    not_made,
    optimizer_bytes,
    parameters,
    readable,
    served_elsewhere,
)

GATHERED_LAYERS = 2
"""The number of unsharded decoder layers on a rank at once: the current one and the next, which is prefetched."""


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


def plan_cluster(
    config: Config, algorithm: Algorithm, sizes: Mapping[str, Sizes | None], nodes: Sequence[Node] | None
) -> ClusterPlan:
    """Place the pools on these nodes or, without nodes, on this machine if the recipe starts a local cluster."""
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
            tuple(item for m in members if m.pool == name for item in _memory(config, algorithm, sizes, m, pool)),
        )
        for name, pool in config.pools.items()
    ]
    return ClusterPlan(tuple(pools), None if nodes is None else tuple(nodes), refusal)


def _memory(
    config: Config, algorithm: Algorithm, sizes: Mapping[str, Sizes | None], member: Member, pool: PoolSettings
) -> Iterator[Item]:
    """Yield the memory that one member needs on one device."""
    if member.key == "rollout.pool":
        return
    teacher = member.key.removeprefix("teachers.").removesuffix(".pool")
    is_teacher = member.key.startswith("teachers.")
    known = sizes[f"teachers.{teacher}" if is_teacher else "student"]
    if is_teacher and config.teachers[teacher].url:
        yield Item(member.name, 0, served_elsewhere(config.teachers[teacher]))
    elif known is None:
        yield Item(member.name, None, not_made((config.teachers[teacher] if is_teacher else config.student).path))
    elif member.key == "learner.pool":
        yield from _learning(config, algorithm, known, pool)
        if algorithm.payload == "full":
            yield from _heads(config, sizes)
    elif member.key == "engine.pool":
        yield _part(f"{member.name} weights", known.adapted, pool.devices, "device")
        yield _cache(config, known, pool)
        yield from _kept_prompts(config, known, pool)
    else:
        yield _part(f"{member.name} weights", known.plain, pool.devices, "device")
        if is_teacher:
            yield from _kept_prompts(config, known, pool)


def _learning(config: Config, algorithm: Algorithm, student: Sizes, pool: PoolSettings) -> Iterator[Item]:
    """Yield the memory of one rank: its shard of weights and states, and the unsharded layers in use."""
    ranks, settings, learns = pool.replicas, config.optimizer, student.learns
    sharded = ranks > 1  # shards are the float32 masters; a single rank has masters in addition to the compute weights
    yield _part("learner weights", _kept(student) if sharded else student.adapted, ranks, "rank")
    if student.has_masters and not sharded:
        yield _part("learner masters", learns.float32, ranks, "rank")
    yield _part("learner gradients", learns.float32, ranks, "rank")
    moments = optimizer_bytes(settings, learns)
    yield Item(
        "learner optimizer", _share(moments, ranks), f"{settings.name}, {readable(moments)}{_over(ranks, 'rank')}"
    )
    if algorithm.critic_losses:
        critic = critic_bytes(settings, student, rounded=not sharded)
        how = f"weights, gradients and {settings.name}, {readable(critic)}{_over(ranks, 'rank')}"
        yield Item("critic", _share(critic, ranks), how)
    if sharded:
        yield _gathered(config, student)
    yield logits(settings, student)
    yield activations(config, student)


def _kept(student: Sizes) -> Weights:
    """Return the sharded weights: trained ones in float32, the others in the compute dtype."""
    more = student.learns.float32.bytes - student.learns.bytes
    return replace(student.adapted, bytes=student.adapted.bytes + more)


def _gathered(config: Config, student: Sizes) -> Item:
    """Return the memory of unsharded weights on every rank: embedding and head during forward and backward, and decoder
    layers while they are in use."""
    each = student.itemsize
    layer = (student.plain.numbers - student.ends.numbers) // student.layers
    taken = (student.ends.numbers + GATHERED_LAYERS * layer) * each
    what = "embedding and head"
    if config.student.lora is None:
        taken += student.ends.float32.bytes
        what += " with their float32 gradients"
    return Item("gathered weights", taken, f"{what}, and {GATHERED_LAYERS} layers, × {each} bytes")


def _heads(config: Config, sizes: Mapping[str, Sizes | None]) -> Iterator[Item]:
    """Yield the memory of the teachers' output heads, which the learner needs to compute their distributions."""
    for name, settings in config.teachers.items():
        teacher = sizes[f"teachers.{name}"]
        if teacher is None:
            yield Item(f"head of teacher {name}", None, not_made(settings.path))
            continue
        each = teacher.plain.bytes // teacher.plain.numbers
        how = f"vocabulary {teacher.vocabulary:,} × width {teacher.width:,} × {each} bytes"
        yield Item(f"head of teacher {name}", teacher.vocabulary * teacher.width * each, how)


def _cache(config: Config, student: Sizes, pool: PoolSettings) -> Item:
    slots, context = config.engine.slots, config.engine.context
    how = f"{slots:,} slots × {context:,} positions × {student.cached:,} bytes at most{_over(pool.devices, 'device')}"
    return Item("key-value cache", _share(slots * context * student.cached, pool.devices), how)


def _kept_prompts(config: Config, known: Sizes, pool: PoolSettings) -> Iterator[Item]:
    if config.rollout.samples > 1:
        how = f"{PREFIX_TOKENS:,} tokens × {known.cached:,} bytes{_over(pool.devices, 'device')}"
        yield Item("kept prompts", _share(PREFIX_TOKENS * known.cached, pool.devices), how)


def _part(name: str, weights: Weights, parts: int, unit: str) -> Item:
    return Item(name, _share(weights.bytes, parts), parameters(weights) + _over(parts, unit))


def _share(count: int, parts: int) -> int:
    return -(-count // parts)


def _over(parts: int, unit: str) -> str:
    return f", over {parts} {unit}s" if parts > 1 else ""


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
