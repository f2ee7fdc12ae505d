"""Test the service alone: leases, and how lost ones are handled."""

from __future__ import annotations

import asyncio
import pickle

import torch

from queue_contract import group, key, make_row, run, teacher
from tutelage.data.trajectory import Key
from tutelage.queue.ledger_service import LedgerAnswer, LedgerService, Reply, Request
from tutelage.queue.schema import describe


async def begin(service: LedgerService, requests: list[Request]) -> Reply:
    return await service.begin(pickle.dumps(requests))


def put_request(row: dict[str, torch.Tensor], at: Key) -> Request:
    return Request("put", at, describe(row))


def test_a_writer_that_dies_leaves_nothing_behind() -> None:
    async def test() -> None:
        service = LedgerService()
        await begin(service, [Request("open", group(0), 1)])
        dead = await begin(service, [put_request(make_row(), key(0))])
        assert dead.answers == [LedgerAnswer(write=())]
        other = await begin(service, [put_request(make_row(), key(0))])
        assert other.answers == [LedgerAnswer(busy=key(0))]
        assert other.lease == 0
        free = asyncio.create_task(service.free(key(0)))
        await asyncio.sleep(0)
        assert not free.done()
        service._lose(dead.lease)
        await free
        alive = await begin(service, [put_request(make_row(), key(0))])
        assert alive.answers == [LedgerAnswer(write=(), place=alive.lease)]
        assert (await service.settle(alive.lease, True)).answers == [LedgerAnswer()]
        late = await service.settle(dead.lease, True)
        assert late.answers == [], "too late: nothing is entered"
        assert (late.counts["lost_leases"], late.counts["lost_rows"]) == (1, 1)
        failing = await begin(service, [Request("fail", group(0), "why")])
        assert sorted(failing.clear) == [(key(0), 0), (key(0), alive.lease)], "it has reported: both places can go"
        service._lose(failing.lease)
        assert (await service.settle(-1, True)).clear == [], "lost while clearing: it may go on at any moment"
        reported = await service.settle(failing.lease, True)
        assert sorted(reported.clear) == [(key(0), 0), (key(0), alive.lease)]

    run(test())


def test_a_lease_is_kept_while_it_is_renewed() -> None:
    async def test() -> None:
        service = LedgerService(lease=1000.0)
        await begin(service, [Request("open", group(0), 1)])
        held = await begin(service, [put_request(make_row(), key(0))])
        first = service._leases[held.lease].timer
        await service.renew(held.lease)
        second = service._leases[held.lease].timer
        assert first.cancelled()
        assert not second.cancelled()
        assert second.when() > first.when()
        await service.renew(-1)
        assert (await service.settle(held.lease, True)).answers == [LedgerAnswer()]
        assert second.cancelled()

    run(test())


def test_one_writer_at_a_time_for_the_same_columns() -> None:
    async def test() -> None:
        service = LedgerService()
        scores = Request("update", key(0), describe(teacher()))
        await begin(service, [Request("open", group(0), 1)])
        await service.settle((await begin(service, [put_request(make_row(), key(0))])).lease, True)
        first = await begin(service, [scores])
        assert first.answers == [LedgerAnswer(write=("teacher_logp",))]
        assert (await begin(service, [scores])).answers == [LedgerAnswer(busy=key(0))]
        failing = await begin(service, [Request("fail", group(0), "why")])
        assert failing.clear == [], "the row is being written: its writer clears it"
        done = await service.settle(first.lease, True)
        assert done.answers == [LedgerAnswer(False)], "the row was dropped meanwhile"
        assert done.clear == [(key(0), 0)]

    run(test())
