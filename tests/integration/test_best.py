"""Test the best checkpoint: the deciding metric, its direction, and that the mark names the evaluated weights."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

import tiny
import tiny_paint
from tutelage import loop
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.measures import MEASURES, Measure, held_out, in_order
from tutelage.config.schema import Config
from tutelage.data.trajectory import Episode, Prompt
from tutelage.evaluation.text import Evaluation, Evaluator
from tutelage.record.measures import change_text, verdict
from tutelage.record.report import write_report
from tutelage.record.run_directory import RunDirectory
from tutelage.rollout.contract import LoopContext, register

PATTERN = {"function": "pattern", "options": {"patterns": "[a-m]"}}
REWARDS = {
    "letter": PATTERN,
    "brief": {**PATTERN, "weight": 0.5},
    "noise": {**PATTERN, "weight": -0.5},
    "gold_accuracy": {**PATTERN, "weight": 0.0},
}


@register("best_draws")
class Draws:
    """Answers are as long as a global generator says, in evaluations too."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        answer = await context.generate(tokens, replace(context.sampling, max_tokens=random.randint(2, 6)))
        return context.episode(prompt, [context.trajectory(tokens, answer)])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("best")
    tiny.settings(path)
    return path


def grpo(root: Path, **sections: Any) -> Config:
    """A run that learns from four rewards: of two weights, of a negative one, and of none."""
    settings = tiny.settings(root, **{"algorithm": {"name": "grpo"}, "rewards": REWARDS, **sections})
    del settings["teachers"]
    settings["rollout"]["samples"] = 2
    return Config.model_validate(settings)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Evaluations in turn report these values of a measure."""
    script: dict[str, list[float]] = {}

    async def evaluate(self: Evaluator) -> Evaluation:
        return Evaluation({name: values.pop(0) for name, values in script.items()})

    monkeypatch.setattr(Evaluator, "__call__", evaluate)
    return script


def mark_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "checkpoints" / "best.json").read_text())
    return found


def steps_of(run: Path) -> tuple[int, ...]:
    return CheckpointStore(run / "checkpoints", 1).steps()


def test_measures_of_a_recipe_know_which_way_is_better(root: Path) -> None:
    assert held_out(tiny.config(root)) == {
        "kl": "lower",
        "kl_fixed": "lower",
        "top1_agreement": "higher",
        "entropy": "neither",
        "length": "neither",
    }
    assert held_out(grpo(root)) == {
        "reward": "higher",
        "reward_letter": "higher",
        "reward_brief": "higher",
        "reward_noise": "lower",
        "gold_accuracy": "higher",
        "entropy": "neither",
        "length": "neither",
    }
    assert held_out(grpo(root, rewards={"letter": PATTERN})).keys() == {"reward", "entropy", "length"}


def test_measures_of_a_recipe_are_those_that_its_evaluations_have(root: Path) -> None:
    for config in (tiny.config(root, name="taught", steps=1), grpo(root, name="rewarded", steps=1)):
        run = loop.train(config)
        for line in tiny.lines(run / "validation.jsonl"):
            assert line.keys() - {"step"} == held_out(config).keys()


@pytest.mark.parametrize(
    ("best", "values", "expected"),
    [
        (None, [0.0, 0.7, 0.3], 2),  # reward
        ("reward", [0.0, 0.3, 0.7], 3),
        ("reward_letter", [0.0, 0.7, 0.3], 2),
        ("reward_noise", [0.0, 0.3, 0.7], 2),
        ("gold_accuracy", [0.0, 0.7, 0.3], 2),
        ("reward", [0.0, 0.5, 0.5], 2),
        ("reward", [0.0, float("nan"), 0.1], 3),
    ],
)
def test_the_best_reward_is_marked(
    root: Path, scripted: dict[str, list[float]], best: str | None, values: list[float], expected: int, request: Any
) -> None:
    scripted[best or "reward"] = list(values)
    sections = {"steps": 3, "validation": {"every": 2}, "checkpoint": {"every": 1, "keep": 1, "best": best}}
    run = loop.train(grpo(root, name=request.node.name, **sections))
    assert mark_of(run) == {"step": expected, "measure": best or "reward", "value": values[expected - 1]}
    assert steps_of(run) == tuple(sorted({expected, 3})), "one is kept besides the best one"


def test_a_best_evaluation_between_two_saves_is_saved(root: Path, scripted: dict[str, list[float]]) -> None:
    scripted["kl"] = [0.9, 0.8, 0.617, 0.674]
    sections = {"validation": {"every": 1}, "checkpoint": {"every": 100, "keep": 1}, "data": {"shuffle": False}}
    run = loop.train(tiny.config(root, name="between", steps=3, **sections))
    assert mark_of(run) == {"step": 2, "measure": "kl", "value": 0.617}
    assert steps_of(run) == (2, 3)
    scripted["kl"] = [0.9, 0.8, 0.7]
    shorter = loop.train(tiny.config(root, name="shorter", steps=2, **sections))
    assert tiny.same(tiny.weights(run, "best"), tiny.weights(shorter, "latest")), "the weights that were measured"
    assert not tiny.same(tiny.weights(run, "best"), tiny.weights(run, "latest"))


def test_a_worse_evaluation_between_two_saves_is_not_saved(root: Path, scripted: dict[str, list[float]]) -> None:
    scripted["kl"] = [0.1, 0.5, 0.6, 0.4]
    sections = {"validation": {"every": 1}, "checkpoint": {"every": 100, "keep": 9}}
    run = loop.train(tiny.config(root, name="worse", steps=3, **sections))
    assert steps_of(run) == (1, 3), "the untrained student has no checkpoint and does not compete"
    assert mark_of(run)["step"] == 3


class Killed(BaseException):
    """Stands in for a kill, where a process of its own would take too long."""


@pytest.mark.parametrize("before", ["_evaluate", "mark_best"])
@pytest.mark.parametrize("at", [2, 4])
def test_a_run_killed_after_its_save_is_evaluated_and_marked_on_the_way_back(
    root: Path, before: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {
        "rollout": {"agent_loop": "best_draws"},
        "validation": {"every": 2},
        "checkpoint": {"every": 2, "keep": 1},
    }
    if not (root / "runs" / "undisturbed").exists():
        loop.train(tiny.config(root, name="undisturbed", **sections))
    name = f"killed-{before}-{at}"
    plain = getattr(loop, before)

    async def dying(run: Any, *rest: Any) -> None:
        if run.step == at:
            raise Killed
        await plain(run, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(loop, before, dying)
        with pytest.raises(Killed):
            loop.train(tiny.config(root, name=name, **sections))
    run, straight = root / "runs" / name, root / "runs" / "undisturbed"
    assert steps_of(run)[-1] == at, "saved before it was evaluated"
    loop.resume(run)
    assert mark_of(run) == mark_of(straight)
    assert steps_of(run) == steps_of(straight)
    assert tiny.lines(run / "validation.jsonl") == tiny.lines(straight / "validation.jsonl")
    assert tiny.same(tiny.weights(run), tiny.weights(straight))


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ("kll", r"checkpoint\.best: no measure is named 'kll'; this recipe has kl, kl_fixed, top1_agreement: did you"),
        ("reward", r"no measure is named 'reward'; this recipe has kl, kl_fixed, top1_agreement$"),
        ("entropy", r"neither a low nor a high entropy is better; this recipe has kl, "),
    ],
)
def test_a_measure_that_cannot_mark_the_best_is_refused(root: Path, best: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        tiny.config(root, checkpoint={"best": best})
    (error,) = caught.value.errors()
    assert re.search(said, error["msg"]), error["msg"]


def test_a_misspelt_reward_is_refused_with_those_that_there_are(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"'reward_leter'; this recipe has reward, .*did you mean reward_letter"):
        grpo(root, checkpoint={"best": "reward_leter"})
    with pytest.raises(ValidationError, match=r"no measure is named 'kl'; this recipe has reward"):
        tiny_paint.config(tmp_path, checkpoint={"best": "kl"})


def test_a_new_main_metric_is_one_line_in_the_table(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", MEASURES), "novelty", Measure("Novelty", "higher", "", "points", "text"))
    assert held_out(tiny.config(root, checkpoint={"best": "novelty"}))["novelty"] == "higher"
    assert in_order(["novelty", "unknown", "kl"]) == ["kl", "novelty", "unknown"]
    assert (change_text("novelty", 0.25, 0.5), verdict("novelty", 0.25, 0.5)) == ("+25.0 points", "better")
    run = RunDirectory.create(root / "novel", "name: novel\n")
    run.log_validation(0, {"novelty": 0.25}, [])
    run.log_validation(2, {"novelty": 0.5}, [])
    assert "Novelty by step" in write_report(run).read_text()
