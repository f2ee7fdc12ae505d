"""Test failing validation: prompts are retried or left out within a budget, and no trained step is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_paint
from tutelage import loop
from tutelage.checkpoint.store import CheckpointStore
from tutelage.cli import main
from tutelage.config.schema import Config
from tutelage.data.trajectory import Episode, Prompt
from tutelage.errors import UserError
from tutelage.evaluation.text import Evaluation, Evaluator
from tutelage.record import RunDirectory
from tutelage.rollout.contract import LoopContext, register

SECTIONS: dict[str, Any] = {"steps": 3, "validation": {"every": 1, "prompts": 3}, "checkpoint": {"every": 100}}
FAULTS: list[tuple[int, str, int, type[Exception]]] = []
"""(evaluation, prompt, times, error): the loop below stumbles over the prompt so often in that evaluation"""


@register("validation_stumbles")
class Stumbles:
    """One turn; evaluations of a process are told apart by the numbers of their prompts."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        if context.key.partition == "validation":
            for number, (evaluation, text, times, error) in enumerate(FAULTS):
                if prompt.request == text and context.key.uid // 3 == evaluation and times > 0:
                    FAULTS[number] = (evaluation, text, times - 1, error)
                    for _ in range(2000):  # the others are complete by then
                        await asyncio.sleep(0)
                    raise error("out of luck")
        return context.episode(prompt, [context.trajectory(tokens, await context.generate(tokens))])


@pytest.fixture(autouse=True)
def no_faults() -> None:
    FAULTS.clear()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("validation")
    tiny.settings(path)
    return path


def config(root: Path, name: str, **sections: Any) -> Config:
    merged = {**SECTIONS, "name": name, "rollout": {"agent_loop": "validation_stumbles"}, **sections}
    return tiny.config(root, **merged)


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    """The run in which nothing fails."""
    return loop.train(config(root, "straight"))


def saved(run: Path) -> tuple[int, ...]:
    return CheckpointStore(run / "checkpoints", 1).steps()


def measured(run: Path) -> dict[int, dict[str, float]]:
    return {line.pop("step"): line for line in tiny.lines(run / "validation.jsonl")}


def assert_alike(one: dict[str, float], other: dict[str, float]) -> None:
    """To rounding: a prompt that is run again is not in the same batch."""
    assert one.keys() == other.keys()
    assert one == pytest.approx(other, rel=1e-5)


def test_a_prompt_that_fails_once_is_run_again(root: Path, straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAULTS.append((3, tiny.PROMPTS[1], 1, RuntimeError))
    run = loop.train(config(root, "once"))
    assert not any(times for _, _, times, _ in FAULTS)
    assert "held-out at step 3: run again after a failure: agent loop 'validation_stumbles' raised RuntimeError" in (
        " ".join(capsys.readouterr().out.split())
    )
    for step, line in measured(straight).items():
        assert_alike(measured(run)[step], line)
    assert [sample.prompt for sample in RunDirectory.open(run).load_samples(3)] == tiny.PROMPTS[:3]


@pytest.mark.parametrize("error", [RuntimeError, UserError])
def test_an_evaluation_that_fails_costs_no_step(
    root: Path, straight: Path, error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    FAULTS.append((1, tiny.PROMPTS[1], 99, error))
    run = loop.train(config(root, f"failing-{error.__name__}"))
    assert "no measures of step 1, the evaluation failed" in " ".join(capsys.readouterr().out.split())
    assert measured(run).keys() == {0, 2, 3}
    for step in (2, 3):
        assert_alike(measured(run)[step], measured(straight)[step])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["failed_evaluations"].keys() == {"1"}
    assert "out of luck" in summary["failed_evaluations"]["1"]
    assert tiny.same(tiny.weights(run), tiny.weights(straight))


def test_after_a_last_evaluation_that_fails_the_run_is_whole_and_resume_makes_it_again(
    root: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAULTS.append((3, tiny.PROMPTS[1], 99, RuntimeError))
    with pytest.raises(UserError, match=r"(?s)all 3 steps are trained and saved in .*step-000003.*out of luck"):
        loop.train(config(root, "last"))
    run = root / "runs" / "last"
    assert saved(run)[-1] == 3
    assert tiny.same(tiny.weights(run), tiny.weights(straight))
    assert json.loads((run / "summary.json").read_text())["eval"].keys() == {"before"}
    FAULTS.append((0, tiny.PROMPTS[1], 99, RuntimeError))  # a process counts its own evaluations
    assert main(["resume", str(run)]) == 2
    assert "the evaluation after the last one failed" in capsys.readouterr().err
    FAULTS.clear()
    assert main(["resume", str(run)]) == 0
    assert_alike(measured(run)[3], measured(straight)[3])
    assert json.loads((run / "summary.json").read_text())["eval"].keys() == {"before", "after"}
    assert CheckpointStore(run / "checkpoints", 1).best_mark() is not None


def test_prompts_that_fail_within_the_budget_are_left_out_and_counted(
    root: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAULTS.append((1, tiny.PROMPTS[0], 99, RuntimeError))
    sections = {"steps": 1, "validation": {"every": 1, "prompts": 3, "max_failed_prompts": 1, "retries": 2}}
    run = loop.train(config(root, "budget", **sections))
    assert FAULTS[0][2] == 99 - 3, "tried three times"
    assert "held-out at step 1: left out of the measures" in " ".join(capsys.readouterr().out.split())
    assert measured(run)[1]["failed_prompts"] == 1
    assert "failed_prompts" not in measured(run)[0]
    kept, whole = (RunDirectory.open(path).load_samples(1) for path in (run, straight))
    assert [(s.uid, s.prompt, s.text) for s in kept] == [(s.uid, s.prompt, s.text) for s in whole[1:]]
    divergences = [value for sample in kept for value in sample.divergence]
    assert measured(run)[1]["kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-5)


def test_an_evaluation_without_any_answer_fails_whatever_the_budget(root: Path) -> None:
    FAULTS.extend((0, text, 99, RuntimeError) for text in tiny.PROMPTS[:3])
    validation = {"prompts": 3, "max_failed_prompts": 99, "retries": 0}
    with pytest.raises(UserError, match=r"(?s)validation failed: 3 of 3 prompts.*out of luck"):
        loop.train(config(root, "none", validation=validation))
    assert not (root / "runs" / "none" / "metrics.jsonl").exists(), "before the first step it stops the run"


def test_an_error_of_another_kind_finds_the_step_saved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    async def broken(self: Evaluator) -> Evaluation:
        calls.append(None)
        if len(calls) == 3:
            raise ZeroDivisionError
        return Evaluation({"kl": float(len(calls))})

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "__call__", broken)
        with pytest.raises(ZeroDivisionError):
            loop.train(config(root, "broken"))
    assert saved(root / "runs" / "broken") == (1, 2)


FLAKY = """
from pathlib import Path

from tutelage.rewards.contract import register_reward


@register_reward("validation_flaky")
def flaky(answer, *, place):
    if Path(place).exists() and answer.prompt == "Name a colour.":
        Path(place).unlink()
        raise ConnectionError("the judge is busy")
    return float(len(answer.text))
"""


def test_a_reward_that_fails_once_in_the_last_validation_loses_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    place, train = tmp_path / "busy", tiny.write_prompts(tmp_path / "train.jsonl", ["Say hello.", "Why?"])
    settings = tiny.settings(
        root,
        name="flaky",
        steps=1,
        prompts_per_step=2,
        algorithm={"name": "grpo"},
        plugins=[str(tmp_path / "flaky.py")],
        rewards={"mine": {"function": "validation_flaky", "options": {"place": str(place)}}},
        rollout={"samples": 2, "max_tokens": 4},
        data={"train": str(train)},
    )
    del settings["teachers"]
    run = loop.train(Config.model_validate(settings))
    place.touch()
    loop.resume(run, steps=2)
    assert not place.exists(), "it failed"
    assert saved(run)[-1] == 2
    assert measured(run).keys() == {0, 1, 2}


DARK = """
from tutelage.rewards.contract import register_reward


@register_reward("validation_dark")
def dark(answer):
    if answer.prompt == "a red fox":
        raise ValueError("too dark to see")
    return float(sum(answer.media.data) % 7)
"""


def test_pictures_of_prompts_that_fail_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "dark.py").write_text(DARK)
    made = tiny_paint.config(
        tmp_path,
        steps=1,
        plugins=[str(tmp_path.parent / "brightness.py"), str(tmp_path / "dark.py")],
        rewards={"mine": {"function": "validation_dark"}},
        rollout={"max_failed_groups": 9},
        validation={"prompts": 3, "max_failed_prompts": 1},
    )
    run = loop.train(made)
    assert [line["failed_prompts"] for line in measured(run).values()] == [1, 1]
