"""The records of the ledger: rows without their tensors, episodes, groups, and the set of finished prompts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tutelage.data.trajectory import EpisodeKey, GroupKey, Key
from tutelage.queue.contract import Tags
from tutelage.queue.schema import Described, Lengths, Trailing, check_row


@dataclass(slots=True)
class LedgerRow:
    """One trajectory, without its tensors."""

    columns: dict[str, Trailing]
    tags: dict[str, int | float | str]
    lengths: Lengths
    oldest: int | None

    @classmethod
    def checked(cls, key: Key, described: Described, tags: Tags | None) -> LedgerRow:
        lengths = check_row(key, described)
        trailing = {name: form.trailing for name, form in described.columns.items()}
        return cls(trailing, dict(tags or {}), lengths, described.oldest)


@dataclass(slots=True)
class LedgerEpisode:
    """The newest attempt of one sample."""

    attempt: int
    count: int | None = None
    """number of trajectories, once the episode is sealed"""
    rows: dict[int, LedgerRow] = field(default_factory=dict)
    """rows by index, which is below `count` once that is known"""


@dataclass(slots=True)
class Group:
    """A group that is open and not yet taken."""

    samples: int
    episodes: dict[int, LedgerEpisode] = field(default_factory=dict)
    failure: str | None = None
    whole: bool = False
    """no trajectory and no seal is missing"""
    common: set[str] | None = None
    """columns that every row of a whole group has; None if not yet computed"""

    def refresh(self) -> None:
        self.whole = len(self.episodes) == self.samples and all(e.count == len(e.rows) for e in self.episodes.values())
        self.common = None

    def resolved(self, needs: Iterable[str]) -> bool:
        if self.failure is not None:
            return True
        if not self.whole:
            return False
        if self.common is None:
            rows = [row.columns for episode in self.episodes.values() for row in episode.rows.values()]
            self.common = set(rows[0]).intersection(*rows[1:])
        return self.common.issuperset(needs)

    def rows(self, group: GroupKey) -> dict[Key, LedgerRow]:
        """Return the rows in key order."""
        return {
            Key(*group, sample, episode.attempt, index): row
            for sample, episode in sorted(self.episodes.items())
            for index, row in sorted(episode.rows.items())
        }

    def missing(self, group: GroupKey, needs: Sequence[str]) -> Iterator[str]:
        """Yield one line for each item that the group lacks to be complete."""
        for sample in range(self.samples):
            where = f"{name_of(group)}/sample {sample}"
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


class Uids:
    """A set of prompt uids, stored as ranges: a long run finishes millions of them, nearly all consecutive."""

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


def name_of(key: GroupKey | EpisodeKey | Key) -> str:
    """Return the name of a group or an episode for messages; for a trajectory, that of its episode."""
    group = f"{key.partition}/prompt {key.uid}"
    return group if isinstance(key, GroupKey) else f"{group}/sample {key.sample}/attempt {key.attempt}"
