"""Test starting runs: a failed start leaves its name free, and runs can start inside an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import tiny
from tutelage import loop
from tutelage.checkpoint.store import CheckpointStore
from tutelage.data.trajectory import Episode, Prompt
from tutelage.errors import UserError
from tutelage.evaluation.text import evaluate_run
from tutelage.rollout.contract import LoopContext, register
from tutelage.rollout.loops.single_turn import SingleTurn

FAILING: set[str] = set()
"""partitions in which the loop below raises"""
INTERRUPT: list[int] = []
"""draws at which it presses Ctrl-C"""


@register("start_trips")
class Trips(SingleTurn):
    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        if context.key.partition in FAILING:
            raise RuntimeError("not today")
        if context.key.partition == "train" and prompt.uid in INTERRUPT:
            while INTERRUPT[0] != prompt.uid:
                await asyncio.sleep(0.001)
            handler = signal.getsignal(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            while signal.getsignal(signal.SIGINT) is handler:
                await asyncio.sleep(0.001)
            INTERRUPT.remove(prompt.uid)
        return await super().run(prompt, context)


@pytest.fixture(autouse=True)
def no_trips() -> None:
    FAILING.clear()
    INTERRUPT.clear()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start")
    tiny.settings(path)
    return path


def config(root: Path, name: str, **sections: Any) -> Any:
    return tiny.config(root, name=name, rollout={"agent_loop": "start_trips"}, **sections)


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    return loop.train(config(root, "straight"))


@pytest.mark.parametrize("partition", ["validation", "train"])
def test_a_start_that_failed_does_not_occupy_the_name(root: Path, straight: Path, partition: str) -> None:
    FAILING.add(partition)
    name, other = f"failed-{partition}", {"validation": {"prompts": 2}, "record": {"writers": ["tensorboard"]}}
    with pytest.raises(UserError, match="not today"):
        loop.train(config(root, name, **other))
    run = root / "runs" / name
    assert (run / "validation.jsonl").exists() == (partition == "train")
    FAILING.clear()
    assert loop.train(config(root, name)) == run
    assert tiny.lines(run / "validation.jsonl") == tiny.lines(straight / "validation.jsonl")
    assert tiny.same(tiny.weights(run), tiny.weights(straight))
    assert not (run / "tensorboard").exists(), "nothing of the first start is left"
    with pytest.raises(UserError, match="already holds a run"):
        loop.train(config(root, name))


def test_a_start_that_failed_can_be_resumed_too(root: Path, straight: Path) -> None:
    FAILING.add("train")
    with pytest.raises(UserError, match="not today"):
        loop.train(config(root, "again"))
    FAILING.clear()
    run = loop.resume(root / "runs" / "again")
    assert tiny.same(tiny.weights(run), tiny.weights(straight))


def test_a_run_can_be_started_where_an_event_loop_is_running(root: Path, straight: Path) -> None:
    async def cell() -> tuple[Path, dict[str, float]]:
        run = loop.train(config(root, "notebook", steps=2))
        run = loop.resume(run, steps=4)
        return run, evaluate_run(config(root, "notebook"), run, "latest")

    run, measured = asyncio.run(cell())
    assert tiny.same(tiny.weights(run), tiny.weights(straight))
    assert tiny.lines(run / "validation.jsonl")[-1] == {"step": 4, **measured}


def test_an_error_comes_out_where_an_event_loop_is_running(root: Path) -> None:
    async def cell() -> None:
        loop.train(config(root, "broken"))

    FAILING.add("train")
    with pytest.raises(UserError, match="not today"):
        asyncio.run(cell())


def test_ctrl_c_finishes_the_step_where_an_event_loop_is_running(root: Path, straight: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    async def cell() -> Path:
        run = loop.train(config(root, "stopped"))
        await asyncio.sleep(0)  # the outer loop was not told to end
        return run

    INTERRUPT.append(3)  # in the second step
    run = asyncio.run(cell())
    assert not INTERRUPT
    assert CheckpointStore(run / "checkpoints", 1).steps() == (2,)
    assert signal.getsignal(signal.SIGINT) is before
    loop.resume(run)
    assert tiny.same(tiny.weights(run), tiny.weights(straight))


def test_a_second_ctrl_c_ends_a_run_at_once_where_an_event_loop_is_running(root: Path) -> None:
    async def cell() -> None:
        loop.train(config(root, "ended"))

    INTERRUPT.extend([3, 4])
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert not CheckpointStore(root / "runs" / "ended" / "checkpoints", 1).steps()
    assert not (root / "runs" / "ended" / ".lock").exists()
