"""The sample queue between rollout and learner, as every back end serves it.

    open(group, samples)        a group announces how many episodes it will have
    put(key, columns, tags, of) one trajectory; the columns are checked against the declared schema
    update(key, columns)        add columns to it, e.g. what a teacher said
    seal(episode, count)        the episode is finished and has `count` trajectories; `of` of a put says the same
    fail(group, reason)         the group will never be complete; its rows are dropped and the failure is reported
    take(needs, groups, …)      wait until that many groups are complete or failed; returns a reference
    get(ref, columns)           resolve a reference where the data is used
    clear(ref)                  forget the rows

A group is complete when all of its episodes are sealed with the number of trajectories they announced and every row
has every needed column. It is handed out whole, once, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tutelage.data.trajectory import Batch, EpisodeKey, GroupKey, Key

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
    """columns that every row has, in order of declaration; without rows, those that were needed"""
    tags: Mapping[Key, Tags] = field(default_factory=dict)
    """as they were put; every key is there"""
    failed: tuple[FailedGroup, ...] = ()
    """the failed ones among the groups taken; part of the count that `take` waited for"""
    stale: tuple[GroupKey, ...] = ()
    """groups dropped because their weights were older than max_lag allowed; part of the count too"""

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, numbers: Sequence[int]) -> BatchRef:
        """These rows alone, in this order."""
        keys = tuple(self.keys[number] for number in numbers)
        return BatchRef(keys, self.columns, {key: self.tags[key] for key in keys})

    def groups(self) -> list[GroupKey]:
        """The groups whose rows it names, in order."""
        return list(dict.fromkeys(key.group for key in self.keys))

    def only(self, groups: Collection[GroupKey]) -> BatchRef:
        """Rows of these groups; failed and stale ones stay behind."""
        keys = tuple(key for key in self.keys if key.group in groups)
        return BatchRef(keys, self.columns, {key: self.tags[key] for key in keys})

    def without(self, groups: Collection[GroupKey]) -> BatchRef:
        """All other rows, and what failed or was stale."""
        kept = self.only([group for group in self.groups() if group not in groups])
        return replace(kept, failed=self.failed, stale=self.stale)

    def joined(self, other: BatchRef) -> BatchRef:
        """Rows of both, in key order."""
        keys = tuple(sorted((*self.keys, *other.keys)))
        columns = tuple(name for name in self.columns if name in other.columns)
        tags = {**self.tags, **other.tags}
        return BatchRef(keys, columns, tags, (*self.failed, *other.failed), (*self.stale, *other.stale))


class SampleQueue(Protocol):
    """One partition is one independent stream (train, validation).

    A group that was taken, reported as failed or dropped as stale is over. What comes for it afterwards, or for an
    attempt that a later one superseded, is late: it is ignored without an error. For a group that was never opened,
    `put`, `update`, `seal` and `fail` raise KeyError.
    """

    async def open(self, group: GroupKey, samples: int) -> None:
        """Announce a group. ValueError if it is open or its rows are not cleared; one that is over may be opened
        again (validation runs the same prompts each time), provided that nothing of its earlier run is still under
        way."""

    async def put(self, key: Key, columns: Mapping[str, Any], tags: Tags | None = None, of: int | None = None) -> None:
        """Store a trajectory, before or after its episode is sealed: tensors, and values that JSON can hold in columns
        declared without a dtype. `of` seals the episode with so many trajectories, in the same call. A later attempt
        of the same episode (the first `put` or `seal` of it) supersedes the earlier one, whose rows are dropped.
        SchemaError if it does not fit, ValueError if it was put before or the episode or group has no such trajectory;
        nothing is stored or sealed then."""

    async def update(self, key: Key, columns: Mapping[str, Any]) -> bool:
        """Add columns, also to a row that was taken and not yet cleared. Idempotent by key: columns already there are
        left as they are, the others are added, and False is returned. KeyError for a row that was never put; False
        for one that was superseded, failed or cleared. SchemaError as in `put`; nothing is added then."""

    async def seal(self, episode: EpisodeKey, count: int) -> None:
        """The episode has `count` trajectories, indices 0 to count − 1, there already or still to come. ValueError if
        that contradicts an earlier seal or a trajectory that is there."""

    async def fail(self, group: GroupKey, reason: str) -> None:
        """Drop the rows of a group, complete or not, and report it with the next `take`. The first reason stands."""

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
        """Wait (on events, never by polling) until `groups` groups of the partition are complete or failed, then take
        the lowest of them in key order: a later group does not wait for an earlier one that is still incomplete. A
        group goes to one taker only. `max_lag`: groups with an action older than version − max_lag are dropped and
        reported as stale. QueueTimeout after `deadline` seconds; nothing is taken then. No groups is an empty
        reference, at once."""

    async def get(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """The data of these columns, rows in the reference's order. Optional columns that no row has are left out; a
        column that some rows have and others lack, or whose open trailing dims differ, is a SchemaError that names
        a key. A reference without rows gives every column asked for, empty, with 0 for open trailing dims.
        KeyError for rows that were not taken or are cleared. A reference may name some rows of a group only."""

    async def clear(self, ref: BatchRef) -> None:
        """Forget the rows; those that are gone already are ignored."""

    async def snapshot(self) -> dict[str, Any]:
        """Everything that is in the queue, as tensors and plain values that JSON can hold."""

    async def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, taken rows included. ValueError if this queue holds rows or open groups."""


class CountingQueue(SampleQueue, Protocol):
    """A queue as the run that owns it sees it."""

    @property
    def counts(self) -> dict[str, int]:
        """What happened since the start of the run; late is what came for a group or an attempt that was over."""
