"""Test the clerk alone: leases, and how lost ones are handled."""

from __future__ import annotations

import asyncio
import pickle

import torch

from queue_contract import group, key, make_row, run, teacher
from tutelage.data.trajectory import Key
from tutelage.queue.clerk import Clerk, ClerkAnswer, Reply, Request
from tutelage.queue.schema import describe


async def begin(clerk: Clerk, requests: list[Request]) -> Reply:
    return await clerk.begin(pickle.dumps(requests))


def put_request(row: dict[str, torch.Tensor], at: Key) -> Request:
    return Request("put", at, describe(row))


def test_a_writer_that_dies_leaves_nothing_behind() -> None:
    async def test() -> None:
        clerk = Clerk()
        await begin(clerk, [Request("open", group(0), 1)])
        dead = await begin(clerk, [put_request(make_row(), key(0))])
        assert dead.answers == [ClerkAnswer(write=())]
        other = await begin(clerk, [put_request(make_row(), key(0))])
        assert other.answers == [ClerkAnswer(busy=key(0))]
        assert other.lease == 0
        free = asyncio.create_task(clerk.free(key(0)))
        await asyncio.sleep(0)
        assert not free.done()
        clerk._lose(dead.lease)
        await free
        alive = await begin(clerk, [put_request(make_row(), key(0))])
        assert alive.answers == [ClerkAnswer(write=(), place=alive.lease)]
        assert (await clerk.settle(alive.lease, True)).answers == [ClerkAnswer()]
        late = await clerk.settle(dead.lease, True)
        assert late.answers == [], "too late: nothing is entered"
        assert (late.counts["lost_leases"], late.counts["lost_rows"]) == (1, 1)
        failing = await begin(clerk, [Request("fail", group(0), "why")])
        assert sorted(failing.clear) == [(key(0), 0), (key(0), alive.lease)], "it has reported: both places can go"
        clerk._lose(failing.lease)
        assert (await clerk.settle(-1, True)).clear == [], "lost while clearing: it may go on at any moment"
        reported = await clerk.settle(failing.lease, True)
        assert sorted(reported.clear) == [(key(0), 0), (key(0), alive.lease)]

    run(test())


def test_a_lease_is_kept_while_it_is_renewed() -> None:
    async def test() -> None:
        clerk = Clerk(lease=1000.0)
        await begin(clerk, [Request("open", group(0), 1)])
        held = await begin(clerk, [put_request(make_row(), key(0))])
        first = clerk._leases[held.lease].timer
        await clerk.renew(held.lease)
        second = clerk._leases[held.lease].timer
        assert first.cancelled()
        assert not second.cancelled()
        assert second.when() > first.when()
        await clerk.renew(-1)
        assert (await clerk.settle(held.lease, True)).answers == [ClerkAnswer()]
        assert second.cancelled()

    run(test())


def test_one_writer_at_a_time_for_the_same_columns() -> None:
    async def test() -> None:
        clerk = Clerk()
        scores = Request("update", key(0), describe(teacher()))
        await begin(clerk, [Request("open", group(0), 1)])
        await clerk.settle((await begin(clerk, [put_request(make_row(), key(0))])).lease, True)
        first = await begin(clerk, [scores])
        assert first.answers == [ClerkAnswer(write=("teacher_logp",))]
        assert (await begin(clerk, [scores])).answers == [ClerkAnswer(busy=key(0))]
        failing = await begin(clerk, [Request("fail", group(0), "why")])
        assert failing.clear == [], "the row is being written: its writer clears it"
        done = await clerk.settle(first.lease, True)
        assert done.answers == [ClerkAnswer(False)], "the row was dropped meanwhile"
        assert done.clear == [(key(0), 0)]

    run(test())
