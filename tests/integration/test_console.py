"""What a run prints: on a terminal lines wrap and stay, in a log file they are whole; nothing about absent teachers."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tiny
from tutelage import loop
from tutelage.config.schema import Config
from tutelage.record import Display, final_table

LETTERS = {"early": {"function": "pattern", "options": {"patterns": "[a-m]"}}}
LONG = "the learner's log-probs are compared with those of the model's own forward pass, on rows of the first batch"


def screen(output: str) -> list[str]:
    """What a terminal shows in the end, scrollback included. Knows as much as a live display uses."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[\??\d*(?:;\d+)*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif moved := re.fullmatch(r"\x1b\[(\d+)A", piece):
            row -= int(moved[1])
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece != "\r" and not piece.startswith("\x1b"):
            lines[row] += piece
    return [line.rstrip() for line in lines]


def terminal(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=True, force_interactive=True, color_system=None), out


def test_steps_stay_in_the_scrollback_of_a_terminal() -> None:
    console, out = terminal(100)
    with Display(3, "demo", console=console) as display:
        for step in (1, 2, 3):
            display.step(step, {"kl": 0.8 / step, "seconds/update": 3.0})
            display._live.refresh()
    shown = screen(out.getvalue())
    assert shown[:3] == [
        "step 1/3  kl 0.800  update 3.0 s",
        "step 2/3  kl 0.400  update 3.0 s",
        "step 3/3  kl 0.267  update 3.0 s",
    ]
    assert sum("demo" in line for line in shown) == 1, "one bar, below"


def test_notes_wrap_at_the_width_of_a_terminal() -> None:
    console, out = terminal(40)
    display = Display(3, "demo", console=console)
    display.note(LONG)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == LONG, "between words"


def test_paths_and_commands_are_not_broken() -> None:
    console, out = terminal(40)
    Display(3, "demo", console=console).line("Go on with: tutelage resume " + "runs/" * 20)
    assert out.getvalue() == "Go on with: tutelage resume " + "runs/" * 20 + "\n"


def test_nothing_is_wrapped_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(3, "demo")
    display.note(LONG)
    metrics = {"a_measure_with_a_name_of_more_than_eighty_characters_" + "x" * 80: 1.0}
    final_table(display.console, metrics, metrics, [("why? " * 20, "old " * 40, "new " * 40)], 1.0, "runs/a")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == LONG
    assert any(next(iter(metrics)) in line for line in lines)
    assert "before: " + ("old " * 40).strip() in lines
    assert "after:  " + ("new " * 40).strip() in lines


def rewarded(root: Path, algorithm: dict[str, Any]) -> Config:
    rollout = {"max_tokens": 6, "samples": 4}
    settings = tiny.settings(root, steps=1, algorithm=algorithm, rollout=rollout, rewards=LETTERS)
    del settings["teachers"]
    return Config.model_validate({**settings, "name": "-".join(map(str, algorithm.values()))})


def steps_printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/1")]


def test_a_run_without_a_teacher_says_nothing_about_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = loop.train(rewarded(tmp_path, {"name": "grpo"}))
    [line] = steps_printed(capsys)
    assert "generate" in line
    assert "teacher" not in line
    assert "reference" not in line
    assert "seconds/teacher" not in tiny.lines(run / "metrics.jsonl")[0]
    loop.train(rewarded(tmp_path, {"name": "grpo", "kl": 0.1}))
    [line] = steps_printed(capsys)
    assert "reference" in line
    assert "teacher" not in line
    loop.train(tiny.config(tmp_path, steps=1, name="taught"))
    [line] = steps_printed(capsys)
    assert "teacher" in line
