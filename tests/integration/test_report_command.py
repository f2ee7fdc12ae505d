"""`report.html` of runs that ended early and of older runs, what it shows without a teacher, and how it is laid out."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import tiny
from tutelage import cli, loop
from tutelage.config.schema import Config
from tutelage.data.trajectory import Key
from tutelage.errors import UserError
from tutelage.record import EvalSample, RolloutRow, RunDirectory, write_report
from tutelage.record.answers import advantage_text
from tutelage.record.chart import Series, line_chart
from tutelage.record.images import ImageRecord, picture_rows
from tutelage.record.report_data import collect
from tutelage.record.timeline import Interval, lanes_chart

LETTERS = {"function": "pattern", "options": {"patterns": "[a-m]"}}
LATER = {"function": "pattern", "weight": -0.5, "options": {"patterns": "[n-z]"}}


def rewarded(root: Path, **sections: Any) -> Config:
    """A run that learns from two rewards and has no teacher."""
    base: dict[str, Any] = {
        "steps": 2,
        "algorithm": {"name": "grpo"},
        "rollout": {"max_tokens": 6, "samples": 4},
        "rewards": {"early": LETTERS, "late": LATER},
    }
    settings = tiny.settings(root, **{**base, **sections})
    del settings["teachers"]
    return Config.model_validate(settings)


# ── when it is written ───────────────────────────────────────────────────────────────────────────────────────────────


def interrupted(root: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Path:
    """A run that gets Ctrl-C while it learns its second step."""
    step = loop.step

    async def signalled(run: Any) -> None:
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        await step(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", signalled)
        return loop.train(tiny.config(root, **sections))


def test_a_run_stopped_with_ctrl_c_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path, monkeypatch)
    assert f"Report: {run / 'report.html'}" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "2 steps recorded" in page
    assert "not finished" in page
    loop.resume(run)
    page = (run / "report.html").read_text()
    assert "4 steps recorded" in page
    assert "not finished" not in page


@pytest.mark.parametrize(("at", "there"), [(1, False), (3, True)])
def test_a_run_that_failed_has_a_report_of_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, there: bool
) -> None:
    step = loop.step

    async def failing(run: Any) -> None:
        if run.step + 1 == at:
            raise UserError("no more")
        await step(run)

    monkeypatch.setattr(loop, "step", failing)
    with pytest.raises(UserError, match="no more"):
        loop.train(tiny.config(tmp_path))
    report = tmp_path / "runs" / "run" / "report.html"
    assert report.exists() == there
    if there:
        assert "2 steps recorded" in report.read_text()


def test_an_error_is_not_hidden_by_a_report_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing(run: Any) -> None:
        (run.directory.path / "metrics.jsonl").write_text("not JSON\nnor this\n")
        raise UserError("no more")

    monkeypatch.setattr(loop, "step", failing)
    with pytest.raises(UserError, match="no more"):
        loop.train(tiny.config(tmp_path))
    assert "no report: " in capsys.readouterr().out


def old_run(path: Path) -> RunDirectory:
    """A run of a version that kept zeros where there was no teacher, and neither rewards nor advantages of answers."""
    run = RunDirectory.create(path, "name: old\nteachers: {}\nsteps: 9\n")
    run.log_validation(0, {"reward": 0.25}, [EvalSample(0, "why?", ("Be", "cause"), (0.0, 0.0))])
    row = RolloutRow(Key("train", 0, 0, 0, 0), "why?", None, ("So",), (1,), (-0.5,), None, None, 1.0, "stop", (0,))
    run.log_step(1, {"reward": 0.5})
    run.log_rollouts(1, [row])
    for file, name in ((path / "validation/step-000000.json", "samples"), (path / "rollouts/step-000001.jsonl", "")):
        content = json.loads(file.read_text())
        for kept in content[name] if name else [content]:
            for key in ("reward_parts", "advantage", *(["reward"] if name else [])):
                kept.pop(key, None)
        file.write_text(json.dumps(content) + "\n")
    (path / "data.json").unlink(missing_ok=True)
    return run


def test_the_command_works_from_anywhere_on_an_old_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old_run(tmp_path / "runs" / "old")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "runs/old"]) == 0
    assert capsys.readouterr().out == "runs/old/report.html\n"
    monkeypatch.chdir(tmp_path / "runs" / "old")
    assert cli.main(["report", "."]) == 0
    assert capsys.readouterr().out == "report.html\n"
    page = Path("report.html").read_text()
    assert "<h1>old</h1>" in page
    assert "Because" in page, "whole, not token by token"
    assert "nats" not in page.split("<h2>Answers to held-out prompts</h2>")[1].split("<h2>Config")[0]


def test_the_command_refuses_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not a run: it has no config.yaml" in capsys.readouterr().err


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_teacher_answers_have_rewards_parts_and_advantages(tmp_path: Path) -> None:
    run = RunDirectory.open(loop.train(rewarded(tmp_path)))
    data = collect(run)
    shown = [answer for prompted in data.heldout for _, answer in prompted.answers if answer is not None]
    assert len(shown) == 6
    for answer in shown:
        assert answer.divergence is None
        early, late = answer.parts
        assert (early.name, early.weight, late.name, late.weight) == ("early", 1.0, "late", -0.5)
        assert answer.reward == pytest.approx(early.value - 0.5 * late.value)
    assert [step.step for step in data.training] == [1, 2]
    for step in data.training:
        [prompted] = step.prompts
        answers = [answer for _, answer in prompted.answers if answer is not None]
        rewards = torch.tensor([answer.reward for answer in answers])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for answer, advantage in zip(answers, expected.tolist(), strict=True):
            assert answer.advantage == pytest.approx([advantage] * len(answer.pieces), abs=1e-5)
            assert answer.reward == pytest.approx(answer.parts[0].value - 0.5 * answer.parts[1].value)
    page = write_report(run).read_text()
    assert "divergence" not in page.split("<h2>Answers to held-out prompts</h2>")[1].split("<h2>Config")[0]
    assert not re.search(r'class="t d\d', page)
    assert page.count("<dt>advantage</dt>") == 8
    assert page.count("<dt>late</dt>") == 14
    assert re.search(r"<dd>[01] × -0.500</dd>", page)


def test_with_a_teacher_tokens_are_coloured(tmp_path: Path) -> None:
    run = RunDirectory.open(loop.train(tiny.config(tmp_path, steps=1)))
    assert all(a.divergence is not None for p in collect(run).heldout for _, a in p.answers if a is not None)
    page = (run.path / "report.html").read_text()
    assert re.search(r'class="t d\d', page)
    assert "divergence, nats" in page
    assert "Answers in training" not in page, "there are no rewards to show"


def test_advantages_of_tokens_that_differ_are_a_mean_and_a_range() -> None:
    assert advantage_text((0.5, 0.5)) == "+0.500"
    assert advantage_text((-1.0, 0.0, 2.5)) == "+0.500 on average, −1 to +2.50"


def test_what_is_kept_of_rewards_and_advantages_is_read_back(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "name: run\n")
    sample = EvalSample(3, "p", ("a",), None, 0.5, {"x": 1.0})
    run.log_validation(0, {}, [sample])
    assert run.load_samples(0) == [sample]
    key = Key("train", 0, 1, 0, 0)
    row = RolloutRow(key, "p", None, ("a",), (1,), (-0.5,), None, None, 1.0, "stop", (0,), (0.25,), {"x": 1.0})
    run.log_rollouts(7, [row])
    assert run.load_rollouts(7) == [row]
    assert run.rollout_steps() == [7]
    with pytest.raises(ValueError, match="advantage"):
        RolloutRow(key, "p", None, ("a",), (1,), (-0.5,), None, None, 1.0, "stop", (0,), (0.25, 0.5))


# ── layout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("values", [(10.79, 10.79001), (-123456.0, 99999.0), (0.5, 0.7), (1e-9, 2e-9)])
def test_labels_of_the_value_axis_fit_left_of_the_plot(values: tuple[float, float]) -> None:
    chart = line_chart("c", [Series("training", list(enumerate(values, start=123_456)))])
    labels = re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]+)<', chart)
    assert labels
    for right, text in labels:
        assert float(right) >= 7 * len(text), f"{text} is cut off"
    (axis,) = set(re.findall(r'class="grid" x1="([\d.]+)"', chart))
    assert all(float(right) < float(axis) for right, _ in labels)


def test_the_label_of_the_last_step_is_not_cut_off() -> None:
    chart = line_chart("c", [Series("training", [(0, 1.0), (10_000_000, 2.0)])])
    at, text = re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)<', chart)[-1]
    assert text == "10,000,000"
    assert float(at) + 3.4 * len(text) <= 420


def test_names_of_engines_fit_left_of_their_lanes() -> None:
    name = "student-0 on a-machine-with-a-rather-long-name.example.org"
    chart = lanes_chart("requests", [Interval(name, "generate", "train/0/0/0", 1.0, 2.0)])
    (right,) = re.findall(r'x="([\d.]+)" y="15"', chart)
    assert float(right) >= 7 * len(name)


def test_every_prompt_stands_under_its_own_picture(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "name: run\n")
    media = torch.randint(0, 255, (11, 3, 96, 96), dtype=torch.uint8)
    record = ImageRecord(run)
    record.write_eval(0, [f"prompt {i}" for i in range(11)], media)
    whole = record.load("eval", 0)
    (first, above), (second, below) = picture_rows(whole)
    assert above == tuple(f"prompt {i}" for i in range(8))
    assert below == ("prompt 8", "prompt 9", "prompt 10")
    grid = Image.open(io.BytesIO(whole.png))
    for number, png in enumerate((first, second)):
        row = Image.open(io.BytesIO(png))
        box = (0, 99 * number, grid.width, 99 * (number + 1) + 3)
        assert row.tobytes() == grid.crop(box).tobytes()
    page = write_report(run).read_text()
    figure = page.split("<figure")[1]
    order = re.findall(r"<img|<ol|prompt \d+</li>|<figcaption", figure)
    rows = [["<img", "<ol", *(f"{name}</li>" for name in names)] for names in (above, below)]
    assert order == [*rows[0], *rows[1], "<figcaption"]
