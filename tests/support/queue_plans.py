"""Rows for tests of the sample queue, and sequences of calls with a plain model of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tutelage.data.trajectory import GroupKey, Key
from tutelage.queue.contract import QueueTimeout, SampleQueue

NEEDS = ("tokens", "teacher_logp")


def group(uid: int, partition: str = "train") -> GroupKey:
    return GroupKey(partition, uid)


def key(uid: int, sample: int = 0, index: int = 0, attempt: int = 0) -> Key:
    return Key("train", uid, sample, attempt, index)


def make_row(mark: int = 0, length: int = 4, actions: int = 2, version: int = 0, **more: Tensor) -> dict[str, Tensor]:
    """Return a row whose last `actions` tokens are actions; `mark` distinguishes rows."""
    return {
        "tokens": torch.full((length,), mark),
        "mask": torch.arange(length) >= length - actions,
        "behaviour_logp": torch.full((actions,), -0.5 - mark),
        "version": torch.full((actions,), version, dtype=torch.int32),
        **more,
    }


def teacher(actions: int = 2) -> dict[str, Tensor]:
    return {"teacher_logp": torch.full((actions,), -1.0)}


async def fill(queue: SampleQueue, uid: int, counts: Sequence[int] = (1,), **row: Any) -> None:
    """Open a group and complete it: counts[i] trajectories in sample i."""
    await queue.open(group(uid), len(counts))
    for sample, count in enumerate(counts):
        for index in range(count):
            await queue.put(key(uid, sample, index), make_row(**row), {"step": uid})
            await queue.update(key(uid, sample, index), teacher(row.get("actions", 2)))
        await queue.seal(key(uid, sample).episode, count)


@dataclass(frozen=True)
class Call:
    """A call of a writer."""

    what: Literal["put", "update", "seal", "fail"]
    key: Key
    count: int = 0
    """The count of a seal, or of a put that seals."""

    async def apply(self, queue: SampleQueue) -> None:
        match self.what:
            case "put":
                await queue.put(self.key, make_row(), of=self.count or None)
            case "update":
                await queue.update(self.key, teacher())
            case "seal":
                await queue.seal(self.key.episode, self.count)
            case "fail":
                await queue.fail(self.key.group, "drawn")


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[int, int], list[Call]]:
    """Draw the samples of each group, and calls for episodes of 1 to 3 trajectories in 1 or 2 attempts. The order is
    arbitrary, except that a row is put before it is updated."""
    samples = {uid: draw(st.integers(1, 3)) for uid in range(draw(st.integers(1, 4)))}
    threads: list[list[Call]] = []
    for uid, count in samples.items():
        if draw(st.integers(0, 4)) == 0:
            threads.append([Call("fail", key(uid))])
        for sample in range(count):
            for attempt in range(draw(st.integers(1, 2))):
                size = draw(st.integers(1, 3))
                rows = [key(uid, sample, index, attempt) for index in range(size)]
                at_once = size if draw(st.booleans()) else 0
                threads += [[Call("put", row, at_once), Call("update", row)] for row in rows]
                if not at_once:
                    threads.append([Call("seal", rows[0], size)])
    order = draw(st.permutations([number for number, thread in enumerate(threads) for _ in thread]))
    steps = [iter(thread) for thread in threads]
    return samples, [next(steps[number]) for number in order]


@dataclass
class Account:
    """A plain model of the queue after the calls so far."""

    samples: dict[int, int]
    calls: list[Call] = field(default_factory=list)
    over: set[int] = field(default_factory=set)

    def add(self, call: Call) -> None:
        if call.key.uid not in self.over:
            self.calls.append(call)

    def rows(self, uid: int) -> list[Key] | None:
        """Return the keys of a complete group, an empty list for a failed one, and None for others."""
        calls = [call for call in self.calls if call.key.uid == uid]
        if any(call.what == "fail" for call in calls):
            return []
        rows: list[Key] = []
        for sample in range(self.samples[uid]):
            mine = [call for call in calls if call.key.sample == sample]
            newest = max((call.key.attempt for call in mine if call.what != "update"), default=0)
            mine = [call for call in mine if call.key.attempt == newest]
            done = [sorted(call.key for call in mine if call.what == what) for what in ("put", "update")]
            if [len(keys) for keys in done] != [max((call.count for call in mine), default=0)] * 2 or not done[0]:
                return None
            rows += done[0]
        return rows

    def ready(self) -> list[int]:
        return [uid for uid in self.samples if uid not in self.over and self.rows(uid) is not None]

    async def check(self, queue: SampleQueue, groups: int) -> None:
        """Take groups and compare them with the model."""
        ready = self.ready()[:groups]
        if len(ready) < groups:
            with pytest.raises(QueueTimeout):
                await queue.take("train", NEEDS, groups, deadline=0.0)
            return
        ref = await queue.take("train", NEEDS, groups, deadline=0.0)
        expected = {uid: self.rows(uid) for uid in ready}
        assert list(ref.keys) == [k for rows in expected.values() for k in rows or []]
        assert [failure.group.uid for failure in ref.failed] == [uid for uid, rows in expected.items() if not rows]
        self.over.update(ready)
