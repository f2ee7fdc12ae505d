"""The ledger of the sample queue: the state of all rows, without their tensors.

Every back end has one ledger. It gets descriptions of columns (`schema.describe`), decides what may be stored, and
lists the rows whose tensors can be deleted (`drain`). Methods change the state without awaiting, so there are no locks.
Takers wait for an event that is set when a group may have become complete.

    open ──► pending ──► taken ──► cleared        get and clear see taken rows only
                │  └───► stale
                └─ fail ► reported by the next take

Calls for a group that is over, or for an attempt that was superseded, are late: they are ignored and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tutelage.data.trajectory import EpisodeKey, GroupKey, Key
from tutelage.queue.contract import BatchRef, FailedGroup, QueueTimeout, Tags
from tutelage.queue.groups import Group, LedgerEpisode, LedgerRow, Uids, name_of
from tutelage.queue.schema import Described, check_even, check_update

_FORMAT = 1
_SHOWN = 10
"""Maximum number of missing items that a timeout lists."""


class Ledger:
    """Implements the behaviour of `SampleQueue`, without the data."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Group] = {}
        self._whole: dict[str, set[GroupKey]] = {}
        """by partition: failed groups, and groups that may lack nothing but columns"""
        self._taken: dict[GroupKey, dict[Key, LedgerRow]] = {}
        self._over: dict[str, Uids] = {}
        self._takers: list[asyncio.Event] = []
        self._dropped: list[Key] = []
        self.counts: dict[str, int] = {
            "taken_groups": 0,
            "failed_groups": 0,
            "stale_groups": 0,
            "superseded_rows": 0,
            "late_rows": 0,
            "late_updates": 0,
            "late_seals": 0,
            "late_failures": 0,
            "repeated_updates": 0,
        }
        """Events since the start of the run. Late calls are those for a group or an attempt that was over."""

    def open(self, group: GroupKey, samples: int) -> None:
        if samples < 1:
            raise ValueError(f"{name_of(group)}: opened with {samples} samples, a group has at least 1")
        if group in self._groups:
            raise ValueError(f"{name_of(group)} is already open, with {self._groups[group].samples} samples")
        if group in self._taken:
            raise ValueError(f"{name_of(group)} was taken and not cleared: clear it before opening it again")
        self._groups[group] = Group(samples)

    def admit_row(self, key: Key, described: Described, of: int | None = None) -> LedgerRow | None:
        """Check a row without storing it. Returns the row, or None if it is late; raises if it or the seal is wrong."""
        group = self._current(key)
        if group is None:
            return None
        episode = group.episodes.get(key.sample)
        if episode is not None and episode.attempt == key.attempt:
            if key.index in episode.rows:
                raise ValueError(f"{key} was put before: a trajectory is put once, columns are added with update")
            if episode.count is not None and key.index >= episode.count:
                raise ValueError(f"{key}: its episode was sealed with {episode.count} trajectories, counted from 0")
        if key.index < 0:
            raise ValueError(f"{key}: trajectories are counted from 0")
        if of is not None:
            if key.index >= of:
                raise ValueError(f"{key}: its episode is sealed with {of} trajectories, counted from 0")
            _check_seal(group, key, of)
        return LedgerRow.checked(key, described, None)

    def put(self, key: Key, described: Described, tags: Tags | None = None, of: int | None = None) -> bool:
        """Enter a row, and seal its episode if `of` is given. Returns False if the row is late."""
        row = self.admit_row(key, described, of)
        if row is None:
            self.counts["late_rows"] += 1
            return False
        row.tags = dict(tags or {})
        at = key.group
        episode = self._attempt(self._groups[at], key)
        episode.rows[key.index] = row
        if of is not None:
            episode.count = of
        self._changed(at, self._groups[at])
        return True

    def admit_columns(self, key: Key, described: Described) -> list[str] | None:
        """Check columns without adding them. Returns those that the row lacks, or None if the row is gone; raises if
        they do not fit."""
        row = self._row(key)
        if row is None:
            return None
        check_update(key, described, row.lengths)
        return _lacking(row, described)

    def update(self, key: Key, described: Described) -> bool:
        """Enter columns of a row. Returns False if the row is gone or already has some of them."""
        row = self._row(key)
        if row is None:
            self.counts["late_updates"] += 1
            return False
        row.lengths = check_update(key, described, row.lengths)
        new = _lacking(row, described)
        row.columns.update({name: described.columns[name].trailing for name in new})
        at = key.group
        if (group := self._groups.get(at)) is not None:
            self._changed(at, group)
        repeated = len(new) < len(described.columns)
        self.counts["repeated_updates"] += repeated
        return not repeated

    def seal(self, episode: EpisodeKey, count: int) -> None:
        group = self._current(episode)
        if group is None:
            self.counts["late_seals"] += 1
            return
        _check_seal(group, episode, count)
        self._attempt(group, episode).count = count
        self._changed(episode.group, group)

    def fail(self, group: GroupKey, reason: str) -> None:
        found = self._live(group)
        if found is None:
            self.counts["late_failures"] += 1
            return
        self._dropped += found.rows(group)
        found.failure = reason
        found.episodes.clear()
        self.counts["failed_groups"] += 1
        self._changed(group, found)

    async def ready(
        self, partition: str, needs: Sequence[str], groups: int, left: float | None, deadline: float | None
    ) -> None:
        """Wait until that many groups are complete or failed.

        Raises QueueTimeout after `left` seconds, the rest of the taker's `deadline`.
        """
        if groups < 0:
            raise ValueError(f"take from {partition}: {groups} groups")
        changed = asyncio.Event()
        self._takers.append(changed)
        try:
            async with asyncio.timeout(left):
                while not self._enough(partition, needs, groups):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            # Groups may have become complete while a busy event loop was late to notice the deadline.
            if not self._enough(partition, needs, groups):
                raise QueueTimeout(self._waiting_for(partition, needs, groups, deadline)) from None
        finally:
            self._takers.remove(changed)

    def hand_out(
        self, partition: str, needs: Sequence[str], groups: int, oldest: int | None
    ) -> tuple[BatchRef, dict[GroupKey, Group]] | None:
        """Take the first groups that are ready, in key order. Returns None if there are too few.

        Otherwise returns a reference, whose columns are in no particular order, and the groups for `give_back`.
        """
        chosen = self._resolved(partition, needs)[:groups]
        if len(chosen) < groups:
            return None
        rows: dict[Key, LedgerRow] = {}
        failed: list[FailedGroup] = []
        stale: list[GroupKey] = []
        handed = {key: self._groups.pop(key) for key in chosen}
        for key, group in handed.items():
            self._whole[key.partition].discard(key)
            self._over.setdefault(key.partition, Uids()).add(key.uid)
            mine = group.rows(key)
            if group.failure is not None:
                failed.append(FailedGroup(key, group.failure))
            elif oldest is not None and any(row.oldest is not None and row.oldest < oldest for row in mine.values()):
                stale.append(key)
                self._dropped += mine
            else:
                self._taken[key] = mine
                rows.update(mine)
        self.counts["stale_groups"] += len(stale)
        self.counts["taken_groups"] += len(chosen) - len(failed) - len(stale)
        common = set.intersection(*(set(row.columns) for row in rows.values())) if rows else needs
        tags = {key: dict(row.tags) for key, row in rows.items()}
        return BatchRef(tuple(rows), tuple(common), tags, tuple(failed), tuple(stale)), handed

    def give_back(self, handed: Mapping[GroupKey, Group]) -> None:
        """Undo `hand_out` for these groups, because their taker was cancelled."""
        for key, group in handed.items():
            self._groups[key] = group
            self._changed(key, group)
            if self._taken.pop(key, None) is not None:
                self.counts["taken_groups"] -= 1
            elif group.failure is None:
                self.counts["stale_groups"] -= 1

    def columns(self, keys: Iterable[Key], names: Iterable[str]) -> tuple[str, ...]:
        """Return which of these columns can be read from these rows. Raises as `SampleQueue.get` does."""
        rows = {key: self._taken.get(key.group, {}).get(key) for key in keys}
        gone = [key for key, row in rows.items() if row is None]
        if gone:
            raise KeyError(
                f"{len(gone)} of {len(rows)} rows are not there, the first is {gone[0]}: "
                "a reference is valid from take until it is cleared"
            )
        return check_even({key: row.columns for key, row in rows.items() if row is not None}, names)

    def clear(self, keys: Iterable[Key]) -> None:
        for key in keys:
            rows = self._taken.get(key.group, {})
            if rows.pop(key, None) is not None:
                self._dropped.append(key)
            if not rows:
                self._taken.pop(key.group, None)

    def drain(self) -> list[Key]:
        """Return the rows that were dropped since the last call; their tensors are no longer needed."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def __contains__(self, key: Key) -> bool:
        """Whether the ledger has this row, taken or not."""
        if key.group in self._taken:
            return key in self._taken[key.group]
        group = self._groups.get(key.group)
        episode = group.episodes.get(key.sample) if group is not None else None
        return episode is not None and episode.attempt == key.attempt and key.index in episode.rows

    def rows(self) -> dict[Key, LedgerRow]:
        """Return all rows: first the pending, then the taken ones, each in key order."""
        pending = {key: row for at, group in sorted(self._groups.items()) for key, row in group.rows(at).items()}
        return pending | {key: row for _, rows in sorted(self._taken.items()) for key, row in rows.items()}

    def snapshot(self) -> dict[str, Any]:
        """Return everything but the columns, which the back end adds to each row."""
        groups = [
            {
                "group": list(key),
                "samples": group.samples,
                "failure": group.failure,
                "episodes": [[sample, e.attempt, e.count] for sample, e in sorted(group.episodes.items())],
                "rows": _save(group.rows(key)),
            }
            for key, group in sorted(self._groups.items())
        ]
        return {
            "format": _FORMAT,
            "groups": groups,
            "taken": [row for _, rows in sorted(self._taken.items()) for row in _save(rows)],
            "over": {partition: [list(part) for part in uids.ranges] for partition, uids in self._over.items()},
            "counts": dict(self.counts),
        }

    def restore(self, snapshot: Mapping[str, Any], described: Mapping[Key, Described]) -> None:
        """Restore a snapshot. Its rows are checked again, as it may come from a file."""
        self.check_empty()
        groups = {GroupKey(*saved["group"]): _load_group(saved, described) for saved in snapshot["groups"]}
        taken: dict[GroupKey, dict[Key, LedgerRow]] = {}
        for key, row in _load_rows(snapshot["taken"], described):
            taken.setdefault(key.group, {})[key] = row
        self._groups, self._taken = groups, taken
        self._over = {partition: Uids(ranges) for partition, ranges in snapshot["over"].items()}
        self.counts = self.counts | snapshot["counts"]
        for at, group in groups.items():
            self._changed(at, group)

    def check_empty(self) -> None:
        if self._groups or self._taken:
            raise ValueError(
                f"restore needs an empty queue, this one has {len(self._groups)} open groups "
                f"and {len(self._taken)} that were taken and not cleared"
            )

    def _live(self, group: GroupKey) -> Group | None:
        """Return a group that rows can be added to, or None if it is over; raise KeyError if it was never opened."""
        found = self._groups.get(group)
        if found is not None:
            return found if found.failure is None else None
        if group.partition in self._over and group.uid in self._over[group.partition]:
            return None
        raise KeyError(f"{name_of(group)} was never opened: call open(group, samples) before anything else")

    def _current(self, key: EpisodeKey | Key) -> Group | None:
        """Return the live group of an episode, or None if the group is over or the episode has a later attempt."""
        group = self._live(key.group)
        if group is None:
            return None
        if not 0 <= key.sample < group.samples:
            raise ValueError(f"{name_of(key)}: its group was opened with {group.samples} samples, counted from 0")
        episode = group.episodes.get(key.sample)
        return None if episode is not None and key.attempt < episode.attempt else group

    def _attempt(self, group: Group, key: EpisodeKey | Key) -> LedgerEpisode:
        """Return the episode at this attempt, which supersedes an earlier one."""
        episode = group.episodes.get(key.sample)
        if episode is None or episode.attempt < key.attempt:
            if episode is not None:
                self.counts["superseded_rows"] += len(episode.rows)
                self._dropped += [Key(*key[:3], episode.attempt, index) for index in episode.rows]
            episode = group.episodes[key.sample] = LedgerEpisode(key.attempt)
        return episode

    def _row(self, key: Key) -> LedgerRow | None:
        """Return a row, taken or not, or None if it was dropped; raise KeyError if it was never put."""
        taken = self._taken.get(key.group)
        if taken is not None:
            return taken.get(key)
        group = self._current(key)
        if group is None:
            return None
        episode = group.episodes.get(key.sample)
        if episode is None or episode.attempt != key.attempt or key.index not in episode.rows:
            raise KeyError(f"{key} was never put: put a trajectory before adding columns to it")
        return episode.rows[key.index]

    def _changed(self, key: GroupKey, group: Group) -> None:
        """Refresh the state of a group, and wake the takers if it may be ready for one of them."""
        group.refresh()
        whole = self._whole.setdefault(key.partition, set())
        if group.whole or group.failure is not None:
            whole.add(key)
            self._wake()
        else:
            whole.discard(key)

    def _wake(self) -> None:
        """Wake all takers, in the order in which they started to wait."""
        for taker in self._takers:
            taker.set()

    def _resolved(self, partition: str, needs: Sequence[str]) -> list[GroupKey]:
        """Return the groups that are ready to be taken, in key order."""
        return sorted(key for key in self._whole.get(partition, ()) if self._groups[key].resolved(needs))

    def _enough(self, partition: str, needs: Sequence[str], groups: int) -> bool:
        """Whether enough groups are ready. Called often, so it first compares a count, which is cheap."""
        return len(self._whole.get(partition, ())) >= groups and len(self._resolved(partition, needs)) >= groups

    def _waiting_for(self, partition: str, needs: Sequence[str], groups: int, deadline: float | None) -> str:
        pending = {key: group for key, group in sorted(self._groups.items()) if key.partition == partition}
        open_ = {key: group for key, group in pending.items() if not group.resolved(needs)}
        lines = [line for key, group in open_.items() for line in group.missing(key, needs)]
        if len(lines) > _SHOWN:
            lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]
        if len(pending) < groups:
            lines.append(f"{groups - len(pending)} groups: never opened")
        ready = len(pending) - len(open_)
        head = f"take from {partition}: {ready} of {groups} groups were ready after {deadline} s; missing:"
        return "\n  ".join([head, *lines])


def _lacking(row: LedgerRow, described: Described) -> list[str]:
    return [name for name in described.columns if name not in row.columns]


def _check_seal(group: Group, episode: EpisodeKey | Key, count: int) -> None:
    """Raise ValueError if a seal contradicts an earlier one or a stored trajectory."""
    if count < 1:
        raise ValueError(f"{name_of(episode)}: sealed with {count} trajectories, an episode has at least 1")
    known = group.episodes.get(episode.sample)
    if known is None or known.attempt != episode.attempt:
        return
    if known.count not in (None, count):
        raise ValueError(f"{name_of(episode)}: sealed with {count} trajectories, before that with {known.count}")
    if beyond := [index for index in sorted(known.rows) if index >= count]:
        raise ValueError(f"{name_of(episode)}: sealed with {count} trajectories, but it has trajectory {beyond[0]}")


def saved_rows(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of all rows of a snapshot, to read or to fill in. Raises ValueError for another format."""
    if snapshot.get("format") != _FORMAT:
        raise ValueError(f"queue snapshot has format {snapshot.get('format')!r}, expected {_FORMAT}")
    return [*(row for group in snapshot["groups"] for row in group["rows"]), *snapshot["taken"]]


def _save(rows: Mapping[Key, LedgerRow]) -> list[dict[str, Any]]:
    return [{"key": list(key), "tags": dict(row.tags)} for key, row in rows.items()]


def _load_rows(
    saved: Iterable[Mapping[str, Any]], described: Mapping[Key, Described]
) -> Iterator[tuple[Key, LedgerRow]]:
    for entry in saved:
        key = Key(*entry["key"])
        yield key, LedgerRow.checked(key, described[key], entry["tags"])


def _load_group(saved: Mapping[str, Any], described: Mapping[Key, Described]) -> Group:
    episodes = {sample: LedgerEpisode(attempt, count) for sample, attempt, count in saved["episodes"]}
    for key, row in _load_rows(saved["rows"], described):
        episodes[key.sample].rows[key.index] = row
    return Group(saved["samples"], episodes, saved["failure"])
