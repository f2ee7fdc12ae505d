"""Who lives in which pool of a cluster, and which arrangements are refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tutelage.config.schema import PoolSettings, RunConfig


class Member(NamedTuple):
    """A part of the run that has a place on a cluster: one process per replica of its pool."""

    name: str
    """as people call it"""
    key: str
    """the setting that names its pool"""
    pool: str
    default: str
    """the pool it has where nothing is said: made if it is not there"""
    shares: bool = True
    """others may live there too"""


def pool_members(config: RunConfig) -> tuple[Member, ...]:
    """All members of a run, in the order of a step."""
    from tutelage.config.schema import Reinforcement  # late: the schema checks itself with this

    found = [
        Member("agent loops", "rollout.pool", config.rollout.pool, "rewards"),
        Member("student", "engine.pool", config.engine.pool, "student"),
    ]
    for name, teacher in config.teachers.items():
        pool = name if teacher.pool is None else teacher.pool
        found.append(Member(f"teacher {name}", f"teachers.{name}.pool", pool, name, shares=False))
    if isinstance(config.algorithm, Reinforcement) and config.algorithm.kl > 0:
        pool = config.algorithm.reference_pool or config.engine.pool
        found.append(Member("reference", "algorithm.reference_pool", pool, "student"))
    return (*found, Member("learner", "learner.pool", config.learner.pool, "learner"))


def fill_pools(config: RunConfig, usual: PoolSettings) -> None:
    """Add the pools that members have by default and the recipe does not describe."""
    for member in pool_members(config):
        if member.pool == member.default:
            config.pools.setdefault(member.pool, usual)


def pool_mistakes(config: RunConfig) -> Iterator[str]:
    """Everything that is wrong with the arrangement, naming the keys that do not go together."""
    members, pools = pool_members(config), config.pools
    for member in members:
        if member.pool not in pools:
            yield f"{member.key} is {member.pool!r}, but pools has no such: there are {', '.join(pools)}"
    for name in pools:
        if name not in [member.pool for member in members]:
            yield f"pools.{name} is used by nobody: remove it, or name it in one of {_keys(members)}"
    for number, one in enumerate(members):
        for other in members[number + 1 :]:
            if one.pool == other.pool and not (one.shares and other.shares):
                teacher, second = (other, one) if one.shares else (one, other)
                yield (
                    f"{teacher.key} and {second.key} are both {one.pool!r}, but a teacher is resident in a pool of its "
                    f"own: give {teacher.key} another one under pools"
                )
    ranks = pools.get(config.learner.pool)
    if ranks is not None and ranks.device == "gpu" and ranks.devices > 1:
        yield (
            f"pools.{config.learner.pool}.devices is {ranks.devices}, but learner.pool has one rank per replica and a "
            f"rank drives one GPU: set devices to 1 and replicas to {ranks.replicas * ranks.devices}"
        )


def _keys(members: tuple[Member, ...]) -> str:
    return ", ".join(member.key for member in members)
