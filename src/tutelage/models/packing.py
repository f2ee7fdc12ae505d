"""Packs: several sequences in one flat row of tokens, in which shared prefixes are computed once.

    sequences   S U a b c      S U a x      S U p
    pack        S U | a b c | a x | p          (with `shortest_prefix` 2, "S U" is a separate segment)

Every segment attends to its ancestors and, causally, to itself. A prefix that was computed earlier may come from a
`PrefixCache` and is then not part of the pack. A model computes the same results for a pack as for the separate
sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SHORTEST_PREFIX = 8
"""Minimum length of a shared prefix that becomes a separate segment."""

Sight = int | Callable[[Tensor, Tensor], Tensor] | None
"""The attention range of a layer: a window in tokens, including the token itself; None for all earlier tokens; or a
function from positions of queries [n, 1] and keys [1, m] to bool [n, m]."""


def visible(sight: Sight, own: Tensor, seen: Tensor) -> Tensor:
    """Return bool [n, m]: whether queries at positions `own` [n, 1] attend to keys at `seen` [1, m]. Later keys are
    never visible."""
    allowed = seen <= own
    if isinstance(sight, int):
        allowed &= own - seen < sight
    elif sight is not None:
        allowed &= sight(own, seen)
    return allowed


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """The keys and values of a prefix by layer, each [key-value heads, length, head width]."""

    length: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(slots=True)
class PrefixCache:
    """A least-recently-used cache of prefixes with a limit in tokens. Clear it when the weights change."""

    max_tokens: int
    entries: OrderedDict[tuple[int, ...], PrefixEntry] = field(default_factory=OrderedDict)
    tokens: int = 0

    def get(self, prefix: tuple[int, ...]) -> PrefixEntry | None:
        entry = self.entries.get(prefix)
        if entry is not None:
            self.entries.move_to_end(prefix)
        return entry

    def put(self, prefix: tuple[int, ...], entry: PrefixEntry) -> None:
        if entry.length > self.max_tokens or prefix in self.entries:
            return
        self.entries[prefix] = entry
        self.tokens += entry.length
        while self.tokens > self.max_tokens:
            _, dropped = self.entries.popitem(last=False)
            self.tokens -= dropped.length

    def clear(self) -> None:
        self.entries.clear()
        self.tokens = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of flat positions that attends to `ancestors` (segment numbers) and causally to itself."""

    start: int
    end: int
    position: int
    """The position of its first token in the sequence."""
    ancestors: tuple[int, ...] = ()
    cached: PrefixEntry | None = None
    """A cached prefix before all ancestors."""


@dataclass(slots=True)
class Pack:
    tokens: Tensor
    """int64 [n]"""
    positions: Tensor
    """int64 [n]"""
    segments: tuple[Segment, ...]
    rows: tuple[Tensor, ...]
    """The flat positions of the tokens of each sequence; −1 for cached tokens."""
    masks: dict[tuple[int, Sight], Tensor] = field(default_factory=dict)
    """Attention masks by (segment, sight), computed once and shared by all layers."""
    lengths: tuple[int, ...] = ()
    """The flat length of each segment."""

    def to(self, device: torch.device) -> Pack:
        """Move the pack to a device. Cached prefixes stay on the device of the model that computed them."""
        if self.tokens.device == device:
            return self
        rows = tuple(row.to(device) for row in self.rows)
        return Pack(self.tokens.to(device), self.positions.to(device), self.segments, rows, lengths=self.lengths)

    def mask(self, number: int, sight: Sight) -> Tensor:
        """Return the attention mask of a segment, bool [own, ancestors + own]."""
        if (number, sight) not in self.masks:
            segment = self.segments[number]
            seen = torch.arange(0, segment.position + segment.end - segment.start, device=self.tokens.device)
            self.masks[number, sight] = visible(sight, seen[segment.position :, None], seen[None, :])
        return self.masks[number, sight]


def pack(
    sequences: Sequence[Tensor],
    cached: Sequence[PrefixEntry | None] | None = None,
    shortest_prefix: int = SHORTEST_PREFIX,
) -> Pack:
    """Pack sequences as a forest of shared prefixes. The pack is on the CPU; the model moves it to its device."""
    builder = _Builder([s.tolist() for s in sequences], shortest_prefix)
    entries = cached if cached is not None else [None] * len(sequences)
    by_entry: dict[int, list[int]] = {}
    for i, entry in enumerate(entries):
        by_entry.setdefault(id(entry), []).append(i)
    for members in by_entry.values():
        entry = entries[members[0]]
        start = entry.length if entry is not None else 0
        builder.add(members, start, (), entry, [torch.full((start,), -1, dtype=torch.int64)] if start else [])
    tokens = torch.tensor(builder.tokens, dtype=torch.int64)
    segments = tuple(builder.segments)
    positions = torch.cat([torch.arange(s.position, s.position + s.end - s.start) for s in segments] or [tokens])
    rows = tuple(builder.rows[i] for i in range(len(sequences)))
    return Pack(tokens, positions, segments, rows, lengths=tuple(s.end - s.start for s in segments))


class _Builder:
    def __init__(self, sequences: list[list[int]], shortest_prefix: int) -> None:
        self.sequences = sequences
        self.shortest = shortest_prefix
        self.tokens: list[int] = []
        self.segments: list[Segment] = []
        self.rows: dict[int, Tensor] = {}

    def add(
        self, members: list[int], start: int, ancestors: tuple[int, ...], entry: PrefixEntry | None, flat: list[Tensor]
    ) -> None:
        """Add sequences that are equal before `start`."""
        shared = self._shared(members, start) if len(members) > 1 else len(self.sequences[members[0]]) - start
        if len(members) == 1 or shared >= self.shortest:
            if shared:
                number = self._segment(members[0], start, start + shared, ancestors, entry)
                segment = self.segments[number]
                ancestors = (*ancestors, number)
                flat = [*flat, torch.arange(segment.start, segment.end)]
            start += shared
        if len(members) == 1:
            self.rows[members[0]] = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int64)
            return
        for bucket in self._buckets(members, start):
            self.add(bucket, start, ancestors, entry, flat)

    def _shared(self, members: list[int], start: int) -> int:
        first = self.sequences[members[0]]
        length = min(len(self.sequences[i]) for i in members) - start
        for offset in range(length):
            token = first[start + offset]
            if any(self.sequences[i][start + offset] != token for i in members[1:]):
                return offset
        return length

    def _buckets(self, members: list[int], start: int) -> list[list[int]]:
        """Group the sequences that share a long enough prefix from `start`; all others are alone."""
        buckets: dict[tuple[int, ...] | int, list[int]] = {}
        for i in members:
            ahead = tuple(self.sequences[i][start : start + self.shortest])
            alone = len(ahead) < self.shortest
            buckets.setdefault(i if alone else ahead, []).append(i)
        return list(buckets.values())

    def _segment(self, member: int, start: int, end: int, ancestors: tuple[int, ...], entry: PrefixEntry | None) -> int:
        at = len(self.tokens)
        self.tokens.extend(self.sequences[member][start:end])
        self.segments.append(Segment(at, at + end - start, start, ancestors, entry))
        return len(self.segments) - 1
