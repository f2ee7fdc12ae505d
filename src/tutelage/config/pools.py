"""The assignment of the parts of a run to resource pools, and its validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tutelage.config.engines import ENGINES

if TYPE_CHECKING:
    from tutelage.config.schema import PoolSettings, RunConfig


class Member(NamedTuple):
    """A part of the run that is placed on the cluster, with one process per replica of its pool."""

    name: str
    """Display name."""
    key: str
    """The setting that names its pool."""
    pool: str
    default: str
    """Its default pool, which is created if the recipe does not define it."""
    shares: bool = True
    """Whether other members may use the same pool."""
    engine: str | None = None
    """The kind of its engine; None if it has no engine."""


def pool_members(config: RunConfig) -> tuple[Member, ...]:
    """Return all members of a run, in the order in which a step uses them."""
    from tutelage.config.schema import Reinforcement  # the schema imports this module

    found = [
        Member("agent loops", "rollout.pool", config.rollout.pool, "rewards"),
        Member("student", "engine.pool", config.engine.pool, "student", engine=config.engine.kind),
    ]
    for name, teacher in config.teachers.items():
        pool = name if teacher.pool is None else teacher.pool
        found.append(Member(f"teacher {name}", f"teachers.{name}.pool", pool, name, False, teacher.engine.kind))
    if isinstance(config.algorithm, Reinforcement) and config.algorithm.kl > 0:
        pool = config.algorithm.reference_pool or config.engine.pool
        found.append(Member("reference", "algorithm.reference_pool", pool, "student", engine=config.engine.kind))
    return (*found, Member("learner", "learner.pool", config.learner.pool, "learner"))


def fill_pools(config: RunConfig, usual: PoolSettings) -> None:
    """Add the default pools that members use and the recipe does not define."""
    for member in pool_members(config):
        if member.pool == member.default:
            config.pools.setdefault(member.pool, usual)


def pool_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield all mistakes in the assignment, each with the keys that conflict."""
    members, pools = pool_members(config), config.pools
    for member in members:
        if member.pool not in pools:
            yield f"{member.key} is {member.pool!r}, but pools does not define it; it defines {', '.join(pools)}"
    for name in pools:
        if name not in [member.pool for member in members]:
            yield f"pools.{name} is not used: remove it, or name it in one of {_keys(members)}"
    for number, one in enumerate(members):
        for other in members[number + 1 :]:
            if one.pool == other.pool and not (one.shares and other.shares):
                teacher, second = (other, one) if one.shares else (one, other)
                yield (
                    f"{teacher.key} and {second.key} are both {one.pool!r}, but a teacher is resident in a pool of its "
                    f"own: give {teacher.key} another one under pools"
                )
    yield from _idle_devices(members, pools)


def _idle_devices(members: tuple[Member, ...], pools: Mapping[str, PoolSettings]) -> Iterator[str]:
    """Yield the pools whose replicas have devices that a member would leave idle. A process computes on one GPU or on
    all CPUs of its replica, which are on one node, unless its engine spans devices. Rewards next to agent loops may use
    whatever there is."""
    for member in members:
        pool = pools.get(member.pool)
        if pool is None or pool.devices == 1 or member.key == "rollout.pool":
            continue
        if member.engine is not None and ENGINES[member.engine].spans_devices:
            continue
        who = "a rank of the learner" if member.engine is None else f"the engine {member.engine!r} of {member.key}"
        if pool.device == "gpu":
            yield (
                f"pools.{member.pool}.devices is {pool.devices}, but {who} computes on one GPU, so {member.key} would "
                f"leave the others idle: set devices to 1 and replicas to {pool.replicas * pool.devices}"
            )
        elif pool.straddle:
            yield (
                f"pools.{member.pool}.straddle is true, but {who} is one process on one node, so {member.key} would "
                "leave the CPUs of other nodes idle: set straddle to false, or devices to 1"
            )


def _keys(members: tuple[Member, ...]) -> str:
    return ", ".join(member.key for member in members)
