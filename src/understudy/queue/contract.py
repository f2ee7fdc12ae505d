"""The sample queue between rollout and learner, as every back end serves it.

    open(group, samples)        a group announces how many episodes it will have
    put(key, columns, tags)     one trajectory; the columns are checked against the declared schema
    update(key, columns)        add columns to it, e.g. what a teacher said
    seal(episode, count)        the episode is finished and has `count` trajectories
    fail(group, reason)         the group will never be complete; its rows are dropped and the failure is reported
    take(needs, groups, …)      wait until that many groups are complete or failed; returns a reference
    get(ref, columns)           resolve a reference where the data is used
    clear(ref)                  forget the rows

A group is complete when all of its episodes are sealed with the number of trajectories they announced and every row
has every needed column. It is handed out whole, once, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from understudy.data.trajectory import Batch, EpisodeKey, GroupKey, Key

Tags = Mapping[str, int | float | str]


class SchemaError(ValueError):
    """A column that is missing, undeclared, or has the wrong dtype or shape; names the key and the column."""


class QueueTimeout(TimeoutError):
    """`take` passed its deadline; the message says what is still missing, by key."""


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that will not be trained on, and why."""

    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class BatchRef:
    """What `take` returns: names of rows, not their data."""

    keys: tuple[Key, ...] = ()
    """in key order"""
    columns: tuple[str, ...] = ()
    """columns that every row has"""
    tags: Mapping[Key, Tags] = field(default_factory=dict)
    failed: tuple[FailedGroup, ...] = ()
    """groups that failed since the last take; part of the count that `take` waited for"""
    stale: tuple[GroupKey, ...] = ()
    """groups dropped because their weights were older than max_lag allowed"""

    def __len__(self) -> int:
        return len(self.keys)


class SampleQueue(Protocol):
    """One partition is one independent stream (train, validation)."""

    async def open(self, group: GroupKey, samples: int) -> None: ...

    async def put(self, key: Key, columns: Mapping[str, Tensor], tags: Tags | None = None) -> None:
        """Store a trajectory. A later attempt of the same episode supersedes the earlier one. SchemaError if it does
        not fit; nothing is stored then."""

    async def update(self, key: Key, columns: Mapping[str, Tensor]) -> bool:
        """Add columns. Idempotent by key: columns already there are left as they are and False is returned. KeyError
        for a row that is not there (unless it was superseded, failed or cleared: then False)."""

    async def seal(self, episode: EpisodeKey, count: int) -> None: ...

    async def fail(self, group: GroupKey, reason: str) -> None: ...

    async def take(
        self,
        partition: str,
        needs: Sequence[str],
        groups: int,
        *,
        version: int = 0,
        max_lag: int | None = None,
        deadline: float | None = None,
    ) -> BatchRef:
        """Wait (on events, never by polling) until `groups` groups of the partition are complete or failed; take them in
        key order. `max_lag`: groups with an action older than version − max_lag are dropped and reported as stale."""

    async def get(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """The data of these columns, rows in the reference's order. Optional columns that no row has are left out; a
        column that some rows have and others lack is an error that names a key."""

    async def clear(self, ref: BatchRef) -> None: ...

    async def snapshot(self) -> dict[str, Any]:
        """Everything that is in the queue, as tensors and plain values."""

    async def restore(self, snapshot: Mapping[str, Any]) -> None: ...
