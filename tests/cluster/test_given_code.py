"""Test that code of the calling program reaches the processes of a Ray run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
import tutelage
from tutelage import loop
from tutelage.algorithms.objectives import OBJECTIVES
from tutelage.backends.given import GivenCode
from tutelage.config.objectives import REGISTERED
from tutelage.rewards.contract import REWARDS
from tutelage.rollout.contract import LOOPS

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def registered() -> Any:
    """A reward, a loop and an objective that no plugin file defines."""
    base = 0.25

    @tutelage.reward("given_length")
    def length(answer: tutelage.Answer) -> float:
        return base + len(answer.text) % 3

    @tutelage.agent_loop("given_loop")
    class Once:
        async def run(self, prompt: Any, context: Any) -> Any:
            tokens = context.render(prompt)
            return context.episode(prompt, [context.trajectory(tokens, await context.generate(tokens))])

    @tutelage.objective("given_square", claim="total_variation")
    def square(student: Any, teacher: Any, settings: Any) -> Any:
        return (student.exp() - teacher.exp()).abs().sum(-1)

    yield
    REWARDS.pop("given_length")
    LOOPS.pop("given_loop")
    OBJECTIVES.pop("given_square")
    REGISTERED.discard("given_square")


@pytest.mark.usefixtures("registered")
def test_code_of_the_calling_program_reaches_all_processes(tmp_path: Path) -> None:
    common = {
        "steps": 2,
        "rewards": {"length": {"function": "given_length"}},
        "algorithm": {"objective": "given_square", "task_weight": 0.5},
        "rollout": {"agent_loop": "given_loop", "samples": 2, "max_tokens": 6},
        "optimizer": {"name": "sgd", "lr": 0.5},
    }
    here = loop.train(tiny.config(tmp_path, name="here", **common))
    there = loop.train(tiny.config(tmp_path, name="there", runtime="ray", **common))
    steps = [tiny.lines(run / "metrics.jsonl") for run in (here, there)]
    for ours, theirs in zip(*steps, strict=True):
        assert theirs["reward"] == pytest.approx(ours["reward"])
        assert ours["reward"] >= 0.25
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)


@pytest.mark.usefixtures("registered")
def test_only_what_a_run_uses_is_sent(tmp_path: Path) -> None:
    assert GivenCode.collect(tiny.config(tmp_path), ["single_turn"]) == GivenCode()
    sent = GivenCode.collect(tiny.config(tmp_path), ["given_loop"])
    assert sent.loops
    assert not sent.rewards
    assert not sent.objectives
