"""Tests that every back end of the sample queue must pass. Subclasses of `QueueContract` build the queue."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queue_plans import NEEDS, Account, fill, group, key, make_row, plans, teacher
from tutelage.data.trajectory import EpisodeKey, Key
from tutelage.queue.constrained import CONSTRAINED, with_constraints
from tutelage.queue.contract import (
    BatchRef,
    FailedGroup,
    QueueTimeout,
    SampleQueue,
    SchemaError,
)

Args = ParamSpec("Args")
LIMIT = 120.0
"""Seconds after which a test that hangs is given up; some start a process, which takes long on a busy machine."""
PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
"""Several back ends run the same property."""


async def is_empty(queue: SampleQueue, needs: Sequence[str] = NEEDS) -> bool:
    """No group is ready."""
    with pytest.raises(QueueTimeout):
        await queue.take("train", needs, 1, deadline=0.0)
    return True


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT))


def on_loop(test: Callable[Args, Coroutine[Any, Any, None]]) -> Callable[Args, None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapper


class QueueContract:
    """Subclass it as Test…, with `make`."""

    def make(self) -> SampleQueue:
        raise NotImplementedError

    @on_loop
    async def test_a_group_goes_through(self) -> None:
        queue = self.make()
        await queue.open(group(0), 2)
        for sample, length in ((1, 3), (0, 5)):
            row = make_row(mark=sample, length=length, reward=torch.tensor(float(sample)))
            await queue.put(key(0, sample), row, {"step": 7, "loop": "single_turn", "loss": 0.5})
            await queue.seal(key(0, sample).episode, 1)
        ref = await queue.take("train", ["tokens"], 1)
        assert ref.keys == (key(0, 0), key(0, 1))
        assert ref.columns == ("tokens", "mask", "behaviour_logp", "version", "reward")
        assert ref.tags == {k: {"step": 7, "loop": "single_turn", "loss": 0.5} for k in ref.keys}
        assert ref.failed == ()
        assert ref.stale == ()

        batch = await queue.get(ref, ["reward", "tokens", "behaviour_logp", "teacher_logp"])
        assert batch.keys == ref.keys
        assert set(batch.columns) == {"tokens", "behaviour_logp"}, "no row has teacher_logp"
        assert [row.tolist() for row in batch.columns["tokens"].rows()] == [[0] * 5, [1] * 3]
        assert [row.tolist() for row in batch.columns["behaviour_logp"].rows()] == [[-0.5] * 2, [-1.5] * 2]
        assert batch.rows["reward"].tolist() == [0.0, 1.0]

        await queue.clear(ref)
        with pytest.raises(KeyError, match=r"2 of 2 rows are not there.*train/prompt 0/sample 0.*until it is cleared"):
            await queue.get(ref, ["tokens"])
        await queue.clear(ref)

    @on_loop
    async def test_a_put_seals_its_episode(self) -> None:
        queue = self.make()
        await queue.open(group(0), 1)
        await queue.put(key(0, index=1), make_row(), of=2)
        assert await is_empty(queue, ["tokens"])
        with pytest.raises(ValueError, match=r"trajectory 2.*sealed with 2 trajectories"):
            await queue.put(key(0, index=2), make_row(), of=3)
        with pytest.raises(ValueError, match=r"sealed with 3 trajectories, before that with 2"):
            await queue.put(key(0), make_row(), of=3)
        with pytest.raises(ValueError, match=r"trajectory 0.*sealed with 0 trajectories"):
            await queue.put(key(0), make_row(), of=0)
        await queue.put(key(0), make_row(mark=1), of=2)
        ref = await queue.take("train", ["tokens"], 1)
        assert ref.keys == (key(0), key(0, index=1))
        assert [row.tolist() for row in (await queue.get(ref, ["tokens"])).columns["tokens"].rows()] == [
            [1] * 4,
            [0] * 4,
        ]

    @on_loop
    async def test_a_put_that_does_not_fit_does_not_seal(self) -> None:
        queue = self.make()
        await queue.open(group(0), 1)
        with pytest.raises(SchemaError, match="reward"):
            await queue.put(key(0), make_row(reward=torch.zeros(3)), of=2)
        await queue.put(key(0), make_row(), of=1)
        assert len(await queue.take("train", ["tokens"], 1)) == 1

    @on_loop
    async def test_trailing_dims_and_reference_to_some_rows(self) -> None:
        queue = self.make()
        await queue.open(group(0), 2)
        for sample in (0, 1):
            hidden = torch.arange(6, dtype=torch.float32).reshape(2, 3) + 10 * sample
            await queue.put(key(0, sample), make_row(teacher_hidden=hidden))
            await queue.seal(key(0, sample).episode, 1)
        ref = await queue.take("train", ["teacher_hidden"], 1)
        part = replace(ref, keys=ref.keys[1:])
        batch = await queue.get(part, ["teacher_hidden"])
        assert batch.columns["teacher_hidden"].values.tolist() == [[10, 11, 12], [13, 14, 15]]
        await queue.clear(part)
        with pytest.raises(KeyError, match="1 of 2 rows"):
            await queue.get(ref, ["tokens"])
        with pytest.raises(ValueError, match="taken and not cleared"):
            await queue.open(group(0), 2)
        await queue.clear(ref)
        await queue.open(group(0), 2)

    @on_loop
    async def test_rows_without_actions(self) -> None:
        queue = self.make()
        await fill(queue, 0, (1, 1), actions=0, length=3)
        ref = await queue.take("train", NEEDS, 1, version=9, max_lag=1)
        assert ref.stale == (), "a row without actions has no age"
        batch = await queue.get(ref, ["teacher_logp", "mask"])
        assert batch.columns["teacher_logp"].lengths.tolist() == [0, 0]
        assert batch.columns["mask"].lengths.tolist() == [3, 3]

    @on_loop
    async def test_empty_batch(self) -> None:
        queue = self.make()
        await queue.open(group(0), 1)
        await queue.fail(group(0), "the loop raised")
        none = await queue.take("train", NEEDS, 0)
        assert (len(none), none.failed) == (0, ())
        ref = await queue.take("train", NEEDS, 1)
        assert ref == BatchRef(columns=NEEDS, failed=(FailedGroup(group(0), "the loop raised"),))
        batch = await queue.get(ref, ["tokens", "teacher_hidden", "reward"])
        assert len(batch) == 0
        assert batch.columns["tokens"].values.dtype == torch.int64
        assert list(batch.columns["teacher_hidden"].values.shape) == [0, 0]
        assert batch.rows["reward"].dtype == torch.float32
        assert list(batch.rows["reward"].shape) == [0]
        assert len(batch.columns["tokens"]) == 0
        await queue.clear(ref)

    @on_loop
    async def test_a_row_that_does_not_fit_is_not_stored(self) -> None:
        queue = self.make()
        await queue.open(group(3), 1)
        row = make_row(reward=torch.tensor(1), teacher_logp=torch.zeros(3))
        del row["behaviour_logp"]
        with pytest.raises(SchemaError, match=f"{key(3)}: behaviour_logp: missing.*reward: dtype.*teacher_logp: has 3"):
            await queue.put(key(3), row)
        with pytest.raises(KeyError, match="never put"):
            await queue.update(key(3), teacher())
        await queue.put(key(3), make_row())
        await queue.seal(key(3).episode, 1)
        assert len(await queue.take("train", [], 1)) == 1

    @on_loop
    async def test_a_bad_row_of_a_later_attempt_leaves_the_earlier_one(self) -> None:
        queue = self.make()
        await fill(queue, 0)
        with pytest.raises(SchemaError):
            await queue.put(key(0, attempt=1), {})
        assert (await queue.take("train", NEEDS, 1)).keys == (key(0),)

    @on_loop
    async def test_update_is_checked_and_idempotent(self) -> None:
        queue = self.make()
        await queue.open(group(0), 1)
        with pytest.raises(KeyError, match="trajectory 0 was never put"):
            await queue.update(key(0), teacher())
        await queue.put(key(0), make_row())
        await queue.seal(key(0).episode, 1)
        with pytest.raises(SchemaError, match=f"{key(0)}: teacher_logp: has 3 values.*2 actions"):
            await queue.update(key(0), {"teacher_index": torch.tensor(0, dtype=torch.int32), **teacher(3)})
        assert await is_empty(queue, ["teacher_index"])
        assert await queue.update(key(0), teacher())
        assert not await queue.update(key(0), {"teacher_logp": torch.zeros(2), "reward": torch.tensor(2.0)})
        ref = await queue.take("train", ["reward"], 1)
        batch = await queue.get(ref, ["teacher_logp", "reward"])
        assert batch.columns["teacher_logp"].values.tolist() == [-1, -1], "what was there stays"
        assert batch.rows["reward"].tolist() == [2]
        assert await queue.update(key(0), {"teacher_index": torch.tensor(4, dtype=torch.int32)})
        assert (await queue.get(ref, ["teacher_index"])).rows["teacher_index"].tolist() == [4]
        await queue.clear(ref)
        assert not await queue.update(key(0), {"teacher_index": torch.tensor(4, dtype=torch.int32)})

    @on_loop
    async def test_columns_of_some_rows_only(self) -> None:
        queue = self.make()
        await queue.open(group(0), 2)
        for sample, width in ((0, 3), (1, 4)):
            await queue.put(key(0, sample), make_row(teacher_hidden=torch.zeros(2, width)))
            await queue.seal(key(0, sample).episode, 1)
        await queue.update(key(0, 0), teacher())
        ref = await queue.take("train", [], 1)
        assert "teacher_logp" not in ref.columns
        with pytest.raises(SchemaError, match=f"teacher_logp: 1 of 2 rows have it, {key(0, 1)} lacks it"):
            await queue.get(ref, ["tokens", "teacher_logp"])
        with pytest.raises(SchemaError, match=rf"teacher_hidden: trailing dims differ: \[3\].*\[4\] in {key(0, 1)}"):
            await queue.get(ref, ["teacher_hidden"])
        with pytest.raises(SchemaError, match="token: is not a declared column; did you mean tokens"):
            await queue.get(ref, ["token"])
        with pytest.raises(SchemaError, match=r"teacher_lopg.*did you mean teacher_logp"):
            await queue.take("train", ["teacher_lopg"], 1, deadline=0.0)

    @on_loop
    async def test_constraints_of_some_rows_only(self) -> None:
        queue = self.make()
        await queue.open(group(0), 3)
        spans = [[2, 4, "regex", "yes|no"]]
        for sample in range(3):
            more = {"constraints": spans} if sample == 1 else {}
            await queue.put(key(0, sample), make_row(mark=sample, **more), {CONSTRAINED: 1} if more else {}, of=1)
        ref = await queue.take("train", ["tokens"], 1)
        batch = await queue.get(ref, ["tokens"])
        assert (await with_constraints(queue, ref, batch)).objects == {"constraints": [[], spans, []]}
        some = ref.rows([2, 1])
        assert (await with_constraints(queue, some, await queue.get(some, ["tokens"]))).objects == {
            "constraints": [[], spans]
        }
        free = ref.rows([0, 2])
        batch = await queue.get(free, ["tokens"])
        assert (await with_constraints(queue, free, batch)) is batch

    @on_loop
    async def test_a_group_is_complete_when_every_part_is_there(self) -> None:
        queue = self.make()
        await queue.open(group(0), 2)
        for row in (key(0, 0, 0), key(0, 0, 2), key(0, 1, 0)):
            await queue.put(row, make_row() | teacher())
        await queue.seal(key(0, 1).episode, 1)
        assert await is_empty(queue), "sample 0 is not sealed"
        await queue.seal(key(0, 0).episode, 3)
        await queue.seal(key(0, 0).episode, 3)
        assert await is_empty(queue), "trajectory 1 is missing"
        await queue.put(key(0, 0, 1), make_row())
        assert await is_empty(queue), "trajectory 1 lacks a column"
        await queue.update(key(0, 0, 1), teacher())
        ref = await queue.take("train", NEEDS, 1)
        assert ref.keys == (key(0, 0, 0), key(0, 0, 1), key(0, 0, 2), key(0, 1, 0))
        assert await is_empty(queue), "handed out once"

    @on_loop
    async def test_wrong_use(self) -> None:
        queue = self.make()
        for call in (
            queue.put(key(0), make_row()),
            queue.update(key(0), {}),
            queue.seal(key(0).episode, 1),
            queue.fail(group(0), "why"),
        ):
            with pytest.raises(KeyError, match="train/prompt 0 was never opened"):
                await call
        with pytest.raises(ValueError, match="at least 1"):
            await queue.open(group(0), 0)
        await queue.open(group(0), 1)
        with pytest.raises(ValueError, match="already open"):
            await queue.open(group(0), 1)
        await queue.put(key(0, index=1), make_row())
        with pytest.raises(ValueError, match=f"{key(0, index=1)} was put before"):
            await queue.put(key(0, index=1), make_row())
        with pytest.raises(ValueError, match="opened with 1 samples"):
            await queue.put(key(0, sample=1), make_row())
        with pytest.raises(ValueError, match="opened with 1 samples"):
            await queue.seal(key(0, sample=1).episode, 1)
        with pytest.raises(ValueError, match="counted from 0"):
            await queue.put(key(0, index=-1), make_row())
        with pytest.raises(ValueError, match="at least 1"):
            await queue.seal(key(0).episode, 0)
        with pytest.raises(ValueError, match="has trajectory 1"):
            await queue.seal(key(0).episode, 1)
        await queue.seal(key(0).episode, 2)
        with pytest.raises(ValueError, match="before that with 2"):
            await queue.seal(key(0).episode, 3)
        with pytest.raises(ValueError, match="sealed with 2"):
            await queue.put(key(0, index=2), make_row())
        with pytest.raises(KeyError, match="not there"):
            await queue.get(BatchRef(keys=(key(0, index=1),)), ["tokens"])

    @on_loop
    async def test_a_later_attempt_supersedes(self) -> None:
        queue = self.make()
        await fill(queue, 0, (2,), mark=1)
        await queue.put(key(0, attempt=2), make_row(mark=2))
        assert await is_empty(queue), "the new attempt is not sealed"
        await queue.put(key(0, index=5), make_row())
        await queue.put(key(0, attempt=1), make_row())
        await queue.seal(key(0).episode, 9)
        assert not await queue.update(key(0), teacher())
        await queue.seal(key(0, attempt=2).episode, 1)
        await queue.update(key(0, attempt=2), teacher())
        ref = await queue.take("train", NEEDS, 1)
        assert ref.keys == (key(0, attempt=2),)
        assert (await queue.get(ref, ["tokens"])).columns["tokens"].values.tolist() == [2] * 4
        await queue.put(key(0, attempt=3), make_row())
        assert await is_empty(queue)

        await fill(queue, 1)
        await queue.seal(key(1, attempt=1).episode, 1)
        assert await is_empty(queue), "a seal supersedes too"
        await queue.put(key(1, attempt=1), make_row() | teacher())
        assert (await queue.take("train", NEEDS, 1)).keys == (key(1, attempt=1),)

    @on_loop
    async def test_failed_groups_count_and_later_rows_are_ignored(self) -> None:
        queue = self.make()
        await queue.open(group(0), 2)
        await queue.put(key(0), make_row())
        await fill(queue, 1)
        await fill(queue, 2)
        await queue.fail(group(0), "sample 1 raised")
        await queue.fail(group(0), "again")
        await queue.put(key(0), make_row())
        await queue.seal(key(0).episode, 1)
        ref = await queue.take("train", NEEDS, 2)
        assert ref.failed == (FailedGroup(group(0), "sample 1 raised"),)
        assert ref.keys == (key(1),)
        await queue.put(key(0), make_row())
        await queue.seal(key(0).episode, 1)
        assert not await queue.update(key(0), teacher())
        await queue.fail(group(1), "too late")
        assert (await queue.get(ref, ["tokens"])).keys == (key(1),)
        await queue.fail(group(2), "complete, but failed")
        assert (await queue.take("train", NEEDS, 1)).failed == (FailedGroup(group(2), "complete, but failed"),)
        assert await is_empty(queue)

    @on_loop
    async def test_stale_groups_are_dropped_and_count(self) -> None:
        queue = self.make()
        for uid, version in enumerate((3, 5, 2, 4)):
            await fill(queue, uid, (1, 1), version=version)
        ref = await queue.take("train", NEEDS, 3, version=5, max_lag=1)
        assert ref.stale == (group(0), group(2))
        assert ref.keys == (key(1, 0), key(1, 1))
        assert not await queue.update(key(0), teacher())
        assert (await queue.take("train", NEEDS, 1, version=5, max_lag=1)).keys == (key(3, 0), key(3, 1))
        await queue.open(group(4), 1)
        mixed = make_row() | teacher() | {"version": torch.tensor([9, 0], dtype=torch.int32)}
        await queue.put(key(4), mixed)
        await queue.seal(key(4).episode, 1)
        assert (await queue.take("train", NEEDS, 1, version=9, max_lag=8)).stale == (group(4),), "one old action"
        await fill(queue, 5, version=0)
        assert (await queue.take("train", NEEDS, 1, version=99)).stale == (), "no limit"

    @on_loop
    async def test_order_and_partitions(self) -> None:
        queue = self.make()
        await queue.open(group(0), 1)
        await queue.open(group(0, "validation"), 1)
        await queue.put(Key("validation", 0, 0, 0, 0), make_row())
        await queue.seal(EpisodeKey("validation", 0, 0), 1)
        assert await is_empty(queue, []), "what is complete is in another partition"
        for uid in (11, 3, 7):
            await fill(queue, uid)
        ref = await queue.take("train", NEEDS, 2)
        assert [k.uid for k in ref.keys] == [3, 7], "the lowest that are complete; group 0 is not"
        assert [k.uid for k in (await queue.take("train", NEEDS, 1)).keys] == [11]
        assert (await queue.take("validation", ["tokens"], 1)).keys == (Key("validation", 0, 0, 0, 0),)

    @on_loop
    async def test_take_wakes_up(self) -> None:
        queue = self.make()
        taker = asyncio.create_task(queue.take("train", NEEDS, 2))
        await fill(queue, 1)
        await queue.open(group(0), 1)
        await queue.seal(key(0).episode, 1)
        await queue.put(key(0), make_row())
        await asyncio.sleep(0)
        assert not taker.done()
        await queue.update(key(0), teacher())
        assert (await taker).keys == (key(0), key(1))
        taker = asyncio.create_task(queue.take("train", NEEDS, 1))
        await queue.open(group(2), 1)
        await asyncio.sleep(0)
        await queue.fail(group(2), "why")
        assert (await taker).failed == (FailedGroup(group(2), "why"),)

    @on_loop
    async def test_cancelled_taker_takes_nothing(self) -> None:
        queue = self.make()
        taker = asyncio.create_task(queue.take("train", NEEDS, 1))
        await asyncio.sleep(0)
        await fill(queue, 0)
        taker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taker
        assert (await queue.take("train", NEEDS, 1)).keys == (key(0),)

    @on_loop
    async def test_timeout_says_what_is_missing(self) -> None:
        queue = self.make()
        await fill(queue, 0)
        await queue.open(group(1), 3)
        await queue.put(key(1, 0, 1), make_row())
        await queue.seal(key(1, 0).episode, 2)
        await queue.put(key(1, 1, attempt=4), make_row() | teacher())
        with pytest.raises(QueueTimeout) as error:
            await queue.take("train", NEEDS, 4, deadline=0.01)
        assert str(error.value).splitlines() == [
            "take from train: 1 of 4 groups were ready after 0.01 s; missing:",
            "  train/prompt 1/sample 0/attempt 0/trajectory 0: not put (sealed with 2)",
            "  train/prompt 1/sample 0/attempt 0/trajectory 1: lacks teacher_logp",
            "  train/prompt 1/sample 1/attempt 4: not sealed, trajectories so far: 1",
            "  train/prompt 1/sample 2: not sealed, no trajectory yet",
            "  2 groups: never opened",
        ]
        assert (await queue.take("train", NEEDS, 1)).keys == (key(0),), "a timeout takes nothing"
        await queue.open(group(2), 1000)
        with pytest.raises(QueueTimeout, match="and 994 more") as error:
            await queue.take("train", NEEDS, 2, deadline=0.0)
        assert len(str(error.value).splitlines()) < 20

    @on_loop
    async def test_snapshot_and_restore(self) -> None:
        first = self.make()
        for uid in range(6):
            await fill(first, uid, (2, 1), mark=uid)
        await first.clear(await first.take("train", NEEDS, 1))
        taken = await first.take("train", NEEDS, 1)
        await first.fail(group(2), "why")
        await first.put(key(3, 1, attempt=1), make_row(mark=33))
        snapshot = await first.snapshot()
        await first.clear(await first.take("train", NEEDS, 3))

        queue = self.make()
        await queue.restore(snapshot)
        assert (await queue.get(taken, ["tokens"])).columns["tokens"].values.tolist() == [1] * 12
        await queue.put(key(0), make_row())
        await queue.put(key(3, 1), make_row())
        assert not await queue.update(key(3, 1), teacher())
        await queue.seal(key(3, 1, attempt=1).episode, 1)
        await queue.update(key(3, 1, attempt=1), teacher())
        ref = await queue.take("train", NEEDS, 4)
        assert ref.failed == (FailedGroup(group(2), "why"),)
        assert ref.keys[:3] == (key(3, 0, 0), key(3, 0, 1), key(3, 1, attempt=1))
        assert [k.uid for k in ref.keys[3:]] == [4, 4, 4, 5, 5, 5]
        assert ref.tags[key(3, 0, 0)] == {"step": 3}
        assert ref.tags[key(3, 1, attempt=1)] == {}
        batch = await queue.get(ref, NEEDS)
        assert batch.columns["tokens"].values.tolist() == [3] * 8 + [33] * 4 + [4] * 12 + [5] * 12
        with pytest.raises(ValueError, match="needs an empty queue"):
            await queue.restore(snapshot)
        with pytest.raises(ValueError, match="format None"):
            await self.make().restore({})

    @PROPERTY
    @given(st.data())
    @on_loop
    async def test_any_interleaving(self, data: st.DataObject) -> None:
        """At every moment, what can be taken is what a plain account of the calls so far says."""
        samples, calls = data.draw(plans())
        takes = data.draw(st.dictionaries(st.integers(0, len(calls)), st.integers(1, 2), max_size=8))
        queue, account = self.make(), Account(samples)
        for uid in samples:
            await queue.open(group(uid), samples[uid])
        for position, call in enumerate(calls):
            await call.apply(queue)
            account.add(call)
            if position in takes:
                await account.check(queue, takes[position])
        while account.ready():
            await account.check(queue, 1)
        assert await is_empty(queue)
        assert account.over == set(samples), "every group, once"

    @PROPERTY
    @given(st.data())
    @on_loop
    async def test_concurrent_takers(self, data: st.DataObject) -> None:
        samples, calls = data.draw(plans())
        shares = data.draw(st.permutations([1] * (len(samples) % 2) + [2] * (len(samples) // 2)))
        pauses = data.draw(st.sets(st.integers(0, len(calls))))
        sizes = {call.key.episode: call.count for call in calls if call.count}
        queue = self.make()
        takers = [asyncio.create_task(queue.take("train", NEEDS, share)) for share in shares]
        for uid in samples:
            await queue.open(group(uid), samples[uid])
        for position, call in enumerate(calls):
            await call.apply(queue)
            if position in pauses:
                await asyncio.sleep(0)
        seen: list[int] = []
        for taker, share in zip(takers, shares, strict=True):
            ref = await taker
            uids = sorted({k.uid for k in ref.keys})
            episodes = sorted({k.episode for k in ref.keys})
            assert len(uids) + len(ref.failed) == share
            assert [e[:3] for e in episodes] == [("train", uid, n) for uid in uids for n in range(samples[uid])]
            assert list(ref.keys) == [e.trajectory(index) for e in episodes for index in range(sizes[e])]
            assert len((await queue.get(ref, NEEDS)).columns["teacher_logp"]) == len(ref)
            seen += uids + [failure.group.uid for failure in ref.failed]
        assert sorted(seen) == sorted(samples)
