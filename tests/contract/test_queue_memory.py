"""Test the in-memory queue: the contract, references instead of copies, counters, events."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from queue_contract import NEEDS, QueueContract, fill, group, key, make_row, run, teacher
from queue_objects import ObjectContract
from tutelage.data.trajectory import COLUMNS, Column, Key
from tutelage.queue import (
    MemoryQueue,
    QueueTimeout,
    SampleQueue,
    SchemaError,
    schema,
)
from tutelage.queue.groups import Uids as _Uids


def check_row(at: Key, columns: Mapping[str, Any]) -> schema.Lengths:
    return schema.check_row(at, schema.describe(columns))


def check_update(at: Key, columns: Mapping[str, Any], lengths: schema.Lengths) -> schema.Lengths:
    return schema.check_update(at, schema.describe(columns), lengths)


class TestMemoryQueue(QueueContract, ObjectContract):
    def make(self) -> SampleQueue:
        return MemoryQueue()


def watched(length: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor over memory that tells when it is freed."""
    array = np.zeros(length, dtype=np.float32)
    return torch.from_numpy(array), weakref.ref(array)


async def put_watched(queue: MemoryQueue, uid: int, attempt: int = 0) -> weakref.ref[Any]:
    """A complete group of one row; the reference is to the memory of its teacher_logp."""
    tensor, memory = watched(2)
    await queue.put(key(uid, attempt=attempt), make_row())
    await queue.update(key(uid, attempt=attempt), {"teacher_logp": tensor})
    await queue.seal(key(uid, attempt=attempt).episode, 1)
    return memory


def test_memory_is_let_go() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        for uid in range(4):
            await queue.open(group(uid), 1)
        cleared = await put_watched(queue, 0)
        ref = await queue.take("train", NEEDS, 1)
        failed, superseded, stale = [await put_watched(queue, uid) for uid in (1, 2, 3)]
        gc.collect()
        assert all(memory() is not None for memory in (cleared, failed, superseded, stale))
        await queue.get(ref, NEEDS)
        await queue.clear(ref)
        await queue.fail(group(1), "why")
        await queue.seal(key(2, attempt=1).episode, 1)
        gc.collect()
        assert all(memory() is None for memory in (cleared, failed, superseded))
        assert (await queue.take("train", NEEDS, 2, version=9, max_lag=0)).stale == (group(3),)
        gc.collect()
        assert stale() is None

    run(test())


def test_rows_are_kept_by_reference_without_their_graph() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        await queue.open(group(0), 1)
        row = make_row()
        await queue.put(key(0), row)
        scores = torch.ones(2, requires_grad=True) * 2
        await queue.update(key(0), {"teacher_logp": scores})
        row["reward"] = torch.tensor(1.0)
        stored = (await queue.snapshot())["groups"][0]["rows"][0]["columns"]
        assert set(stored) == {"tokens", "mask", "behaviour_logp", "version", "teacher_logp"}
        assert stored["tokens"].data_ptr() == row["tokens"].data_ptr()
        assert stored["teacher_logp"].data_ptr() == scores.data_ptr()
        assert not stored["teacher_logp"].requires_grad

    run(test())


def test_counts() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        for uid in range(3):
            await fill(queue, uid, (2,))
        await queue.put(key(0, attempt=1), make_row())
        await queue.put(key(0), make_row())
        await queue.update(key(0), teacher())
        await queue.seal(key(0).episode, 2)
        await queue.fail(group(0), "why")
        await queue.fail(group(0), "again")
        await queue.put(key(0, attempt=1), make_row())
        await queue.update(key(1), teacher())
        await queue.take("train", NEEDS, 2)
        await queue.take("train", NEEDS, 1, version=1, max_lag=0)
        assert queue.counts == {
            "taken_groups": 1,
            "failed_groups": 1,
            "stale_groups": 1,
            "superseded_rows": 2,
            "late_rows": 2,
            "late_updates": 1,
            "late_seals": 1,
            "late_failures": 1,
            "repeated_updates": 1,
        }
        again = MemoryQueue()
        with pytest.raises(ValueError, match="needs an empty queue"):
            await queue.restore(await again.snapshot())
        await queue.clear(await queue.take("train", [], 0))
        snapshot = await queue.snapshot()
        await again.restore(snapshot)
        assert again.counts == queue.counts
        assert again.counts is not snapshot["counts"]

    run(test())


def test_snapshot_is_plain_and_apart_from_the_queue() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        for uid in range(3):
            await fill(queue, uid)
        await queue.take("train", NEEDS, 1)
        snapshot = await queue.snapshot()
        tensors: list[torch.Tensor] = []

        def as_list(value: object) -> list[Any]:
            assert isinstance(value, torch.Tensor)
            tensors.append(value)
            return value.tolist()

        text = json.dumps(snapshot, default=as_list)
        assert len(tensors) == 15
        await queue.fail(group(1), "why")
        await queue.update(key(2), {"reward": torch.tensor(1.0)})
        assert json.dumps(snapshot, default=as_list) == text
        other = MemoryQueue()
        await other.restore(snapshot)
        assert json.dumps(await other.snapshot(), default=as_list) == text

    run(test())


def test_restore_checks_rows_and_wakes_takers() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        await fill(queue, 0)
        snapshot = await queue.snapshot()
        other = MemoryQueue()
        taker = asyncio.create_task(other.take("train", NEEDS, 1))
        await asyncio.sleep(0)
        good = snapshot["groups"][0]["rows"][0]["columns"].pop("tokens")
        with pytest.raises(SchemaError, match=f"{key(0)}: tokens: missing"):
            await other.restore(snapshot)
        snapshot["groups"][0]["rows"][0]["columns"]["tokens"] = good
        await other.restore(snapshot)
        assert (await taker).keys == (key(0),)

    run(test())


def test_waiting_uses_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        queue = MemoryQueue()
        loop = asyncio.get_running_loop()
        timers: list[object] = []
        monkeypatch.setattr(loop, "call_later", lambda *args, **kwargs: timers.append(args))
        monkeypatch.setattr(loop, "call_at", lambda *args, **kwargs: timers.append(args))
        taker = asyncio.create_task(queue.take("train", NEEDS, 1))
        for _ in range(3):
            await asyncio.sleep(0)
        await fill(queue, 0)
        assert (await taker).keys == (key(0),)
        monkeypatch.undo()
        assert timers == []

    run(test())


def test_takers_are_served_in_the_order_they_came() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        takers = [asyncio.create_task(queue.take("train", NEEDS, 1)) for _ in range(3)]
        await asyncio.sleep(0)
        for uid in (2, 0, 1):
            await fill(queue, uid)
        assert [(await taker).keys[0].uid for taker in takers] == [0, 1, 2]
        with pytest.raises(QueueTimeout):
            await queue.take("train", NEEDS, 1, deadline=0.0)
        assert queue._ledger._takers == [], "nothing stays of takers that have gone"

    run(test())


def test_what_is_ready_when_the_deadline_passes_is_handed_out() -> None:
    async def test() -> None:
        queue = MemoryQueue()
        taker = asyncio.create_task(queue.take("train", NEEDS, 1, deadline=0.001))
        await asyncio.sleep(0)
        time.sleep(0.005)  # the loop is busy: the timer is due
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has gone off, the taker has not run yet
        assert not taker.done()
        await fill(queue, 0)
        assert (await taker).keys == (key(0),)

    run(test())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": None}, "tokens: missing"),
        ({"version": None}, "version: missing"),
        ({"teacher_logps": torch.zeros(2)}, "teacher_logps: is not a declared column; did you mean teacher_logp?"),
        ({"zzz": torch.zeros(2)}, "zzz: is not a declared column; declare it"),
        ({"tokens": torch.zeros(4)}, "tokens: dtype is torch.float32, expected torch.int64"),
        ({"mask": torch.ones(1, 4, dtype=torch.bool)}, "mask: shape is [1, 4] (2 dims), expected [sequence] (1 dims)"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask: has 3 values, but the row has 4 tokens"),
        ({"behaviour_logp": torch.zeros(4)}, "behaviour_logp: has 4 values, but the row has 2 actions"),
        ({"version": torch.zeros(1, dtype=torch.int32)}, "version: has 1 values, but the row has 2 actions"),
        ({"teacher_hidden": torch.zeros(2)}, "teacher_hidden: shape is [2] (1 dims), expected [action, any]"),
        ({"teacher_hidden": torch.zeros(3, 8)}, "teacher_hidden: has 3 values, but the row has 2 actions"),
        ({"reward": torch.zeros(1)}, "reward: shape is [1] (1 dims), expected [] (0 dims)"),
        ({"reward": 1.0}, "reward: is a float, expected a torch.float32 tensor"),
    ],
)
def test_what_does_not_fit_the_schema(change: dict[str, Any], expected: str) -> None:
    row = {name: value for name, value in {**make_row(), **change}.items() if value is not None}
    with pytest.raises(SchemaError) as error:
        check_row(key(3), row)
    assert str(error.value).startswith(f"{key(3)}: {expected}")
    assert ";" not in str(error.value).replace(expected, ""), "one mistake, one complaint"


def test_step_columns_agree_and_fixed_trailing_dims_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for column in (
        Column("latents", torch.float32, "step", "engines", trailing=(4, None)),
        Column("sigmas", torch.float32, "step", "engines"),
        Column("embedding", torch.float32, "row", "rewards", trailing=(None, 2)),
    ):
        monkeypatch.setitem(COLUMNS, column.name, column)
    at = key(0)
    lengths = check_row(at, make_row(latents=torch.zeros(10, 4, 7)))
    assert lengths == {"sequence": 4, "action": 2, "step": 10}
    assert check_update(at, {"sigmas": torch.zeros(10)}, lengths) == lengths
    with pytest.raises(SchemaError, match="sigmas: has 9 values, but the row has 10 steps"):
        check_update(at, {"sigmas": torch.zeros(9)}, lengths)
    with pytest.raises(SchemaError, match=r"latents: shape is \[10, 5, 7\], expected \[step, 4, any\]"):
        check_row(at, make_row(latents=torch.zeros(10, 5, 7)))
    with pytest.raises(SchemaError, match=r"embedding: shape is \[2, 3\], expected \[any, 2\]"):
        check_row(at, make_row(embedding=torch.zeros(2, 3)))
    check_row(at, make_row(embedding=torch.zeros(3, 2)))

    async def test() -> None:
        queue = MemoryQueue()
        await queue.open(group(0), 1)
        await queue.put(at, make_row())
        await queue.update(at, {"sigmas": torch.zeros(10)})
        with pytest.raises(SchemaError, match="latents: has 9 values, but the row has 10 steps"):
            await queue.update(at, {"latents": torch.zeros(9, 4, 7)})

    run(test())


@given(st.lists(st.integers(0, 30)))
def test_finished_prompts_are_kept_as_ranges(uids: list[int]) -> None:
    ranges = _Uids()
    for uid in uids:
        ranges.add(uid)
    assert [uid for uid in range(-1, 32) if uid in ranges] == sorted(set(uids))
    flat = [bound for part in ranges.ranges for bound in part]
    assert flat == sorted(set(flat)), "ranges neither touch nor overlap"
    assert _Uids(ranges.ranges).ranges == ranges.ranges
