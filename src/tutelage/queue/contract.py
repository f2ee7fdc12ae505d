"""The contract of the sample queue between rollout and learner.

    open(group, samples)        announce a group and its number of episodes
    put(key, columns, tags, of) store one trajectory; its columns are checked against the declared schema
    update(key, columns)        add columns to a trajectory, e.g. teacher scores
    seal(episode, count)        finish an episode of `count` trajectories; the argument `of` of a put does the same
    fail(group, reason)         give up a group: its rows are dropped and the failure is reported
    take(needs, groups, …)      wait until that many groups are complete or failed; returns a reference
    get(ref, columns)           fetch the data of a reference, where it is used
    clear(ref)                  delete the rows

A group is complete when all of its episodes are sealed, all of their trajectories are stored, and every row has every
needed column. A group is handed out whole and at most once.
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
    """`take` reached its deadline; the message lists what is still missing, by key."""


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A failed group, which is not trained on, and the reason."""

    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A reference to rows, without their data. Returned by `take`."""

    keys: tuple[Key, ...] = ()
    """in key order"""
    columns: tuple[str, ...] = ()
    """columns that every row has, in order of declaration; without rows, the needed columns"""
    tags: Mapping[Key, Tags] = field(default_factory=dict)
    """tags of every row, as given to `put`"""
    failed: tuple[FailedGroup, ...] = ()
    """failed groups; they count towards the number of groups that `take` waits for"""
    stale: tuple[GroupKey, ...] = ()
    """groups dropped because their weights are older than max_lag allows; they count too"""

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, numbers: Sequence[int]) -> BatchRef:
        """Return a reference to these rows only, in this order."""
        keys = tuple(self.keys[number] for number in numbers)
        return BatchRef(keys, self.columns, {key: self.tags[key] for key in keys})

    def groups(self) -> list[GroupKey]:
        """Return the groups of its rows, in order."""
        return list(dict.fromkeys(key.group for key in self.keys))

    def only(self, groups: Collection[GroupKey]) -> BatchRef:
        """Return a reference to the rows of these groups, without failed and stale ones."""
        keys = tuple(key for key in self.keys if key.group in groups)
        return BatchRef(keys, self.columns, {key: self.tags[key] for key in keys})

    def without(self, groups: Collection[GroupKey]) -> BatchRef:
        """Return a reference to the rows of all other groups, with the failed and stale ones."""
        kept = self.only([group for group in self.groups() if group not in groups])
        return replace(kept, failed=self.failed, stale=self.stale)

    def joined(self, other: BatchRef) -> BatchRef:
        """Return a reference to the rows of both, in key order."""
        keys = tuple(sorted((*self.keys, *other.keys)))
        columns = tuple(name for name in self.columns if name in other.columns)
        tags = {**self.tags, **other.tags}
        return BatchRef(keys, columns, tags, (*self.failed, *other.failed), (*self.stale, *other.stale))


class SampleQueue(Protocol):
    """The sample queue. Each partition (train, validation) is an independent stream.

    A group that was taken, reported as failed or dropped as stale is over. Calls for such a group, or for an attempt
    that a later one superseded, are late: they are ignored without an error. For a group that was never opened, `put`,
    `update`, `seal` and `fail` raise KeyError.
    """

    async def open(self, group: GroupKey, samples: int) -> None:
        """Announce a group. Raises ValueError if it is open or its rows are not cleared.

        A group that is over may be opened again (validation runs the same prompts each time), if no call for its
        earlier run is still under way.
        """

    async def put(self, key: Key, columns: Mapping[str, Any], tags: Tags | None = None, of: int | None = None) -> None:
        """Store a trajectory, before or after its episode is sealed.

        Columns are tensors, or JSON values if they are declared without a dtype. `of` also seals the episode with that
        many trajectories. The first `put` or `seal` of a later attempt supersedes the earlier attempt, whose rows are
        dropped. Raises SchemaError if the columns do not fit the schema, and ValueError if the trajectory was already
        put or is out of range for its episode or group; nothing is stored or sealed then.
        """

    async def update(self, key: Key, columns: Mapping[str, Any]) -> bool:
        """Add columns to a row, which may already be taken but not cleared. Returns whether all columns were new.

        Columns that the row already has are left unchanged; the others are added. Returns False for a row that was
        superseded, failed or cleared. Raises KeyError for a row that was never put, and SchemaError as in `put`;
        nothing is added then.
        """

    async def seal(self, episode: EpisodeKey, count: int) -> None:
        """Declare that the episode has `count` trajectories, with indices 0 to count − 1, already put or not.

        Raises ValueError if this contradicts an earlier seal or a stored trajectory.
        """

    async def fail(self, group: GroupKey, reason: str) -> None:
        """Drop the rows of a group, complete or not, and report it in the next `take`. The first reason is kept."""

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
        """Wait until `groups` groups of the partition are complete or failed, and take the first of them in key order.

        A complete group does not wait for an earlier one that is incomplete. Each group goes to one taker only. With
        `max_lag`, groups with an action older than version − max_lag are dropped and reported as stale. Raises
        QueueTimeout after `deadline` seconds; nothing is taken then. With `groups` 0, returns an empty reference at
        once. Waiting is driven by events, not by polling.
        """

    async def get(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """Return the data of these columns, with rows in the order of the reference.

        Optional columns that no row has are left out. Raises SchemaError, naming a key, if only some rows have a
        column or its open trailing dims differ, and KeyError for rows that were not taken or are cleared. A reference
        may name only some rows of a group. Without rows, every requested column is empty, with 0 for open trailing
        dims.
        """

    async def clear(self, ref: BatchRef) -> None:
        """Delete the rows; rows that are already gone are ignored."""

    async def snapshot(self) -> dict[str, Any]:
        """Return the whole content of the queue as tensors and JSON values."""

    async def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore a snapshot, including taken rows. Raises ValueError if this queue has rows or open groups."""


class CountingQueue(SampleQueue, Protocol):
    """A sample queue that counts events."""

    @property
    def counts(self) -> dict[str, int]:
        """Events since the start of the run. Late calls are those for a group or an attempt that was over."""
