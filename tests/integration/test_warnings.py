"""What a run warns about, once: answers that are all cut off, a teacher that is the student, collapsed entropy. And one
mistake of a model is one message, however many prompts it concerns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from tutelage import loop
from tutelage.config.schema import Config
from tutelage.errors import UserError
from tutelage.record import notes

CUT_OFF = "answers were cut off before their end"
AGREES = "the student already agrees with its teachers"
COLLAPSED = "the student's entropy has collapsed"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def quiet(root: Path, **sections: Any) -> Config:
    """Two steps without evaluation."""
    return tiny.config(root, **{"steps": 2, "data": {"validation": None}, **sections})


def test_answers_that_are_all_cut_off_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.train(quiet(tmp_path, rollout={"max_tokens": 1}))
    text = said(capsys)
    assert text.count(CUT_OFF) == 1
    assert f"step 1: all 3 {CUT_OFF}" in text
    assert "raise rollout.max_tokens (1)" in text
    loop.train(quiet(tmp_path, name="wanted", rollout={"min_tokens": 2, "max_tokens": 2}))
    assert CUT_OFF not in said(capsys), "the recipe wants answers of this length"


def test_some_answers_that_end_are_enough() -> None:
    config = Config.model_validate({"student": {"path": "a"}, "teachers": {"t": {"path": "b"}}, "data": {"train": "c"}})
    assert notes.truncated(config, 4, ["length", "stop", "length"]) is None
    assert notes.truncated(config, 4, []) is None
    assert notes.truncated(config, 4, ["length"]) is not None


def test_a_teacher_that_is_the_student_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = str(tiny.save(tmp_path / "student", seed=0))
    loop.train(quiet(tmp_path, teachers={"main": {"path": own, "dtype": "float32"}}))
    text = said(capsys)
    assert text.count(AGREES) == 1
    assert f"teachers.main.path = {own}" in text
    loop.train(quiet(tmp_path, name="other"))
    assert AGREES not in said(capsys)


def test_a_student_that_has_come_to_agree_is_no_mistake(tmp_path: Path) -> None:
    assert notes.same_teacher(quiet(tmp_path), 1, {"divergence": -1e-6}) is not None
    assert notes.same_teacher(quiet(tmp_path), 2, {"divergence": 0.0}) is None
    assert notes.same_teacher(quiet(tmp_path), 1, {"divergence": float("nan")}) is None
    assert notes.same_teacher(quiet(tmp_path), 1, {"reward": 0.0}) is None


def test_collapsed_entropy_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {"early": {"function": "pattern", "options": {"patterns": "[a-m]"}}}
    rollout = {"samples": 2, "max_tokens": 4}
    data = {"validation": None}
    settings = tiny.settings(tmp_path, steps=2, algorithm={"name": "grpo"}, rewards=rewards, rollout=rollout, data=data)
    del settings["teachers"]
    loop.train(Config.model_validate(settings))
    assert COLLAPSED not in said(capsys)
    monkeypatch.setattr(notes, "COLLAPSED", 100.0)
    loop.train(Config.model_validate({**settings, "name": "collapsed"}))
    text = said(capsys)
    assert text.count(COLLAPSED) == 1
    assert "raise algorithm.entropy (0)" in text
    assert "lower optimizer.lr (0.01)" in text


def test_a_student_as_certain_as_its_teacher_has_not_collapsed(tmp_path: Path) -> None:
    assert notes.collapsed(quiet(tmp_path), 9, {"entropy": 0.001, "divergence": 0.5}) is not None
    assert notes.collapsed(quiet(tmp_path), 9, {"entropy": 0.001, "divergence": 0.002}) is None
    assert notes.collapsed(quiet(tmp_path), 9, {"entropy": 0.5}) is None
    assert notes.collapsed(quiet(tmp_path), 9, {"loss": 0.5}) is None


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_missing_chat_template_is_said_once(tmp_path: Path, who: str) -> None:
    settings = tiny.settings(tmp_path)
    path = tmp_path / who
    settings["teachers"]["main"]["system_prompt"] = "You know better."
    (path / "chat_template.jinja").unlink(missing_ok=True)
    kept = path / "tokenizer_config.json"
    kept.write_text(json.dumps({k: v for k, v in json.loads(kept.read_text()).items() if k != "chat_template"}))
    with pytest.raises(UserError) as stopped:
        loop.train(Config.model_validate(settings))
    key = "student.path" if who == "student" else "teachers.main.path"
    assert str(stopped.value).count("chat template") == 1
    assert str(stopped.value).startswith(f"{key} = {path}: the tokenizer has no chat template: set data.template: none")
