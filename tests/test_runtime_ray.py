"""Calls to several processes at once: who fails is heard, who is late is named."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from understudy.data.trajectory import Key
from understudy.errors import UserError
from understudy.learner.update import NonFiniteLoss
from understudy.runtime.contract import ReplicaGone
from understudy.runtime.ray import all_within


async def soon() -> None:
    await asyncio.sleep(0)


async def never() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise ValueError("out of memory")


def test_whoever_is_late_is_named() -> None:
    calls = {"student, replica 0": soon, "student, replica 1": never, "student, replica 2": never}
    with pytest.raises(UserError) as raised:
        asyncio.run(all_within({name: call() for name, call in calls.items()}, 0.05, "publishing version 7"))
    assert str(raised.value) == (
        "publishing version 7 did not finish within 0.05 s: no answer from student, replica 1, student, replica 2"
    )


def test_an_error_ends_the_waiting_at_once() -> None:
    with pytest.raises(ValueError, match="out of memory"):
        asyncio.run(all_within({"a": never(), "b": fails()}, 60, "starting"))
    asyncio.run(all_within({"a": soon(), "b": soon()}, 60, "starting"))


def test_errors_travel_whole() -> None:
    gone = pickle.loads(pickle.dumps(ReplicaGone("teacher 'a', replica 0 died", for_good=True)))
    assert (str(gone), gone.for_good) == ("teacher 'a', replica 0 died", True)
    keys = (Key("train", 1, 0, 0, 0),)
    loss = pickle.loads(pickle.dumps(NonFiniteLoss("the loss is not finite", keys)))
    assert (str(loss), loss.keys) == ("the loss is not finite", keys)
