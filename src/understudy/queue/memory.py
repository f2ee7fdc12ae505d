"""The sample queue within one process, on one asyncio loop.

Rows are kept as they were given: tensors by reference, detached, neither copied nor padded. Methods change the state
between two awaits, so there are no locks; takers sleep on an event that is set when a group may have become complete.

    open ──► pending ──► taken ──► cleared        get and clear see taken rows only
                │  └───► stale
                └─ fail ► reported by the next take

What comes for a group that is over, or for an attempt that was superseded, is late: ignored and counted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from understudy.data.trajectory import COLUMNS, Batch, EpisodeKey, GroupKey, Key
from understudy.queue.contract import BatchRef, FailedGroup, QueueTimeout, Tags
from understudy.queue.schema import Lengths, check_names, check_row, check_update, join

_FORMAT = 1
_SHOWN = 10
"""Lines of what is missing that a timeout shows."""


@dataclass(slots=True)
class _Row:
    columns: dict[str, Tensor]
    tags: dict[str, int | float | str]
    lengths: Lengths

    @classmethod
    def checked(cls, key: Key, columns: Mapping[str, Tensor], tags: Tags | None) -> _Row:
        lengths = check_row(key, columns)
        return cls({name: value.detach() for name, value in columns.items()}, dict(tags or {}), lengths)


@dataclass(slots=True)
class _Episode:
    """The newest attempt of one sample."""

    attempt: int
    count: int | None = None
    """trajectories it was sealed with"""
    rows: dict[int, _Row] = field(default_factory=dict)
    """by index; below `count` once that is known"""


@dataclass(slots=True)
class _Group:
    """A group that was opened and not yet taken."""

    samples: int
    episodes: dict[int, _Episode] = field(default_factory=dict)
    failure: str | None = None
    common: frozenset[str] | None = None
    """columns that every row has; None as long as trajectories or seals are missing"""

    def refresh(self) -> None:
        whole = len(self.episodes) == self.samples and all(e.count == len(e.rows) for e in self.episodes.values())
        rows = [row.columns for episode in self.episodes.values() for row in episode.rows.values()]
        self.common = frozenset.intersection(*map(frozenset, rows)) if whole else None

    def resolved(self, needs: Iterable[str]) -> bool:
        return self.failure is not None or (self.common is not None and self.common.issuperset(needs))

    def rows(self, group: GroupKey) -> dict[Key, _Row]:
        """In key order."""
        return {
            Key(*group, sample, episode.attempt, index): row
            for sample, episode in sorted(self.episodes.items())
            for index, row in sorted(episode.rows.items())
        }

    def missing(self, group: GroupKey, needs: Sequence[str]) -> Iterator[str]:
        """One line for each thing that keeps the group from being complete."""
        for sample in range(self.samples):
            where = f"{_name(group)}/sample {sample}"
            episode = self.episodes.get(sample)
            if episode is None:
                yield f"{where}: not sealed, no trajectory yet"
                continue
            where += f"/attempt {episode.attempt}"
            if episode.count is None:
                yield f"{where}: not sealed, trajectories so far: {len(episode.rows)}"
            for index in range(episode.count or 0):
                if index not in episode.rows:
                    yield f"{where}/trajectory {index}: not put (sealed with {episode.count})"
            for index, row in sorted(episode.rows.items()):
                if lacking := [name for name in needs if name not in row.columns]:
                    yield f"{where}/trajectory {index}: lacks {', '.join(lacking)}"


class _Uids:
    """A set of prompt positions, kept as ranges: a long run finishes millions of them, nearly all in a row."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges = [[int(start), int(end)] for start, end in ranges]

    def __contains__(self, uid: int) -> bool:
        at = bisect_right(self.ranges, uid, key=lambda part: part[0])
        return at > 0 and uid < self.ranges[at - 1][1]

    def add(self, uid: int) -> None:
        if uid in self:
            return
        at = bisect_right(self.ranges, uid, key=lambda part: part[0])
        start, end, first, last = uid, uid + 1, at, at
        if at > 0 and self.ranges[at - 1][1] == uid:
            start, first = self.ranges[at - 1][0], at - 1
        if at < len(self.ranges) and self.ranges[at][0] == uid + 1:
            end, last = self.ranges[at][1], at + 1
        self.ranges[first:last] = [[start, end]]


class MemoryQueue:
    """The in-memory back end of `SampleQueue`."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, _Group] = {}
        self._taken: dict[GroupKey, dict[Key, _Row]] = {}
        self._over: dict[str, _Uids] = {}
        self._takers: list[asyncio.Event] = []
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
        """What happened since the start of the run; late is what came for a group or an attempt that was over"""

    async def open(self, group: GroupKey, samples: int) -> None:
        if samples < 1:
            raise ValueError(f"{_name(group)}: opened with {samples} samples, a group has at least 1")
        if group in self._groups:
            raise ValueError(f"{_name(group)} is already open, with {self._groups[group].samples} samples")
        if group in self._taken:
            raise ValueError(f"{_name(group)} was taken and not cleared: clear it before opening it again")
        self._groups[group] = _Group(samples)

    async def put(self, key: Key, columns: Mapping[str, Tensor], tags: Tags | None = None) -> None:
        group = self._current(key.episode)
        if group is None:
            self.counts["late_rows"] += 1
            return
        episode = group.episodes.get(key.sample)
        if episode is not None and episode.attempt == key.attempt:
            if key.index in episode.rows:
                raise ValueError(f"{key} was put before: a trajectory is put once, columns are added with update")
            if episode.count is not None and key.index >= episode.count:
                raise ValueError(f"{key}: its episode was sealed with {episode.count} trajectories, counted from 0")
        if key.index < 0:
            raise ValueError(f"{key}: trajectories are counted from 0")
        row = _Row.checked(key, columns, tags)
        self._attempt(group, key.episode).rows[key.index] = row
        self._changed(group)

    async def update(self, key: Key, columns: Mapping[str, Tensor]) -> bool:
        row = self._row(key)
        if row is None:
            self.counts["late_updates"] += 1
            return False
        lengths = check_update(key, columns, row.lengths)
        new = {name: value.detach() for name, value in columns.items() if name not in row.columns}
        row.columns.update(new)
        row.lengths = lengths
        if key.group in self._groups:
            self._changed(self._groups[key.group])
        repeated = len(new) < len(columns)
        self.counts["repeated_updates"] += repeated
        return not repeated

    async def seal(self, episode: EpisodeKey, count: int) -> None:
        group = self._current(episode)
        if group is None:
            self.counts["late_seals"] += 1
            return
        if count < 1:
            raise ValueError(f"{_name(episode)}: sealed with {count} trajectories, an episode has at least 1")
        known = group.episodes.get(episode.sample)
        if known is not None and known.attempt == episode.attempt:
            if known.count not in (None, count):
                raise ValueError(f"{_name(episode)}: sealed with {count} trajectories, before that with {known.count}")
            if beyond := [index for index in sorted(known.rows) if index >= count]:
                raise ValueError(
                    f"{_name(episode)}: sealed with {count} trajectories, but it has trajectory {beyond[0]}"
                )
        self._attempt(group, episode).count = count
        self._changed(group)

    async def fail(self, group: GroupKey, reason: str) -> None:
        found = self._live(group)
        if found is None:
            self.counts["late_failures"] += 1
            return
        found.failure = reason
        found.episodes.clear()
        self.counts["failed_groups"] += 1
        self._changed(found)

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
        needs = check_names(needs, f"take from {partition}")
        if groups < 0:
            raise ValueError(f"take from {partition}: {groups} groups")
        changed = asyncio.Event()
        self._takers.append(changed)
        try:
            async with asyncio.timeout(deadline):
                while len(self._resolved(partition, needs)) < groups:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            # What became complete while the loop was too busy to notice the deadline is still handed out.
            if len(self._resolved(partition, needs)) < groups:
                raise QueueTimeout(self._waiting_for(partition, needs, groups, deadline)) from None
        finally:
            self._takers.remove(changed)
        oldest = None if max_lag is None else version - max_lag
        return self._hand_out(self._resolved(partition, needs)[:groups], needs, oldest)

    async def get(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        rows = {key: self._taken.get(key.group, {}).get(key) for key in ref.keys}
        gone = [key for key, row in rows.items() if row is None]
        if gone:
            raise KeyError(
                f"{len(gone)} of {len(rows)} rows are not there, the first is {gone[0]}: "
                "a reference is good from take until it is cleared"
            )
        return join({key: row.columns for key, row in rows.items() if row is not None}, columns)

    async def clear(self, ref: BatchRef) -> None:
        for key in ref.keys:
            rows = self._taken.get(key.group, {})
            rows.pop(key, None)
            if not rows:
                self._taken.pop(key.group, None)

    async def snapshot(self) -> dict[str, Any]:
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

    async def restore(self, snapshot: Mapping[str, Any]) -> None:
        if self._groups or self._taken:
            raise ValueError(
                f"restore needs an empty queue, this one has {len(self._groups)} open groups "
                f"and {len(self._taken)} that were taken and not cleared"
            )
        if snapshot.get("format") != _FORMAT:
            raise ValueError(f"queue snapshot has format {snapshot.get('format')!r}, expected {_FORMAT}")
        groups = {GroupKey(*saved["group"]): _load_group(saved) for saved in snapshot["groups"]}
        taken: dict[GroupKey, dict[Key, _Row]] = {}
        for key, row in _load_rows(snapshot["taken"]):
            taken.setdefault(key.group, {})[key] = row
        self._groups, self._taken = groups, taken
        self._over = {partition: _Uids(ranges) for partition, ranges in snapshot["over"].items()}
        self.counts = self.counts | snapshot["counts"]
        self._wake()

    def _live(self, group: GroupKey) -> _Group | None:
        """The group, if rows can still be added to it; None if it is over; KeyError if it was never opened."""
        found = self._groups.get(group)
        if found is not None:
            return found if found.failure is None else None
        if group.partition in self._over and group.uid in self._over[group.partition]:
            return None
        raise KeyError(f"{_name(group)} was never opened: call open(group, samples) before anything else")

    def _current(self, key: EpisodeKey) -> _Group | None:
        """The live group of an episode; None if the group is over or a later attempt of the episode is there."""
        group = self._live(key.group)
        if group is None:
            return None
        if not 0 <= key.sample < group.samples:
            raise ValueError(f"{_name(key)}: its group was opened with {group.samples} samples, counted from 0")
        episode = group.episodes.get(key.sample)
        return None if episode is not None and key.attempt < episode.attempt else group

    def _attempt(self, group: _Group, key: EpisodeKey) -> _Episode:
        """The episode at this attempt; an earlier attempt makes room for it."""
        episode = group.episodes.get(key.sample)
        if episode is None or episode.attempt < key.attempt:
            self.counts["superseded_rows"] += len(episode.rows) if episode is not None else 0
            episode = group.episodes[key.sample] = _Episode(key.attempt)
        return episode

    def _row(self, key: Key) -> _Row | None:
        """The row, taken or not; None if it is gone for a known reason, KeyError if it was never put."""
        if key.group in self._taken:
            return self._taken[key.group].get(key)
        group = self._current(key.episode)
        if group is None:
            return None
        episode = group.episodes.get(key.sample)
        if episode is None or episode.attempt != key.attempt or key.index not in episode.rows:
            raise KeyError(f"{key} was never put: put a trajectory before adding columns to it")
        return episode.rows[key.index]

    def _changed(self, group: _Group) -> None:
        """Bring a group's state up to date and wake the takers if it may be ready for one of them."""
        group.refresh()
        if group.resolved(()):
            self._wake()

    def _wake(self) -> None:
        """Takers run in the order in which they came."""
        for taker in self._takers:
            taker.set()

    def _resolved(self, partition: str, needs: Sequence[str]) -> list[GroupKey]:
        """Groups that a taker need not wait for any longer, in key order."""
        return sorted(k for k, group in self._groups.items() if k.partition == partition and group.resolved(needs))

    def _hand_out(self, groups: Sequence[GroupKey], needs: Sequence[str], oldest: int | None) -> BatchRef:
        rows: dict[Key, _Row] = {}
        failed: list[FailedGroup] = []
        stale: list[GroupKey] = []
        for key in groups:
            group = self._groups.pop(key)
            self._over.setdefault(key.partition, _Uids()).add(key.uid)
            mine = group.rows(key)
            if group.failure is not None:
                failed.append(FailedGroup(key, group.failure))
            elif oldest is not None and any(bool((row.columns["version"] < oldest).any()) for row in mine.values()):
                stale.append(key)
            else:
                self._taken[key] = mine
                rows.update(mine)
        self.counts["stale_groups"] += len(stale)
        self.counts["taken_groups"] += len(groups) - len(failed) - len(stale)
        common = [name for name in COLUMNS if all(name in row.columns for row in rows.values())]
        tags = {key: dict(row.tags) for key, row in rows.items()}
        return BatchRef(tuple(rows), tuple(common if rows else needs), tags, tuple(failed), tuple(stale))

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


def _name(key: GroupKey | EpisodeKey) -> str:
    group = f"{key.partition}/prompt {key.uid}"
    return group if isinstance(key, GroupKey) else f"{group}/sample {key.sample}/attempt {key.attempt}"


def _save(rows: Mapping[Key, _Row]) -> list[dict[str, Any]]:
    return [{"key": list(key), "tags": dict(row.tags), "columns": dict(row.columns)} for key, row in rows.items()]


def _load_rows(saved: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Key, _Row]]:
    """Checked again: a snapshot may come from a file."""
    for entry in saved:
        key = Key(*entry["key"])
        yield key, _Row.checked(key, entry["columns"], entry["tags"])


def _load_group(saved: Mapping[str, Any]) -> _Group:
    episodes = {sample: _Episode(attempt, count) for sample, attempt, count in saved["episodes"]}
    for key, row in _load_rows(saved["rows"]):
        episodes[key.sample].rows[key.index] = row
    group = _Group(saved["samples"], episodes, saved["failure"])
    group.refresh()
    return group
