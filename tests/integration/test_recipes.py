"""Test that the shipped recipes load, are short, and run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tiny
from repository import ROOT
from tutelage.cli import main
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.engines import ENGINES
from tutelage.config.load import load
from tutelage.config.schema import Config

pytestmark = pytest.mark.slow

RECIPES = ROOT / "recipes"
SHIPPED = sorted(RECIPES.glob("*.yaml"))
WRITERS = [path for path in SHIPPED if isinstance(load(path).config, Config)]
PAINTERS = [path for path in SHIPPED if path not in WRITERS]
ELSEWHERE = [path for path in WRITERS if ENGINES[load(path).config.engine.kind].package]
"""Recipes whose engines have an environment of their own; tests/vllm runs them."""
MOST_KEYS = {"quickstart": 70}


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_every_recipe_loads_wherever_one_stands(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(recipe).config
    assert isinstance(config, Config | DiffusionConfig)
    assert config.name.replace("-", "_") == recipe.stem, "runs are found by the name of their recipe"
    for path in (config.data.train, config.data.validation):
        assert path is None or Path(path).exists()


def test_the_quickstart_is_there() -> None:
    assert "quickstart" in [path.stem for path in SHIPPED]


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_few_keys_are_shown(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(recipe), "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\S+ = .*# ", line) for line in lines)
    assert 20 < len(lines) <= MOST_KEYS.get(recipe.stem, 90)


@pytest.mark.parametrize("recipe", [path for path in WRITERS if path not in ELSEWHERE], ids=lambda path: path.stem)
def test_a_recipe_runs_two_steps_with_tiny_models(recipe: Path, tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    teachers = [f"teachers.{name}.path={tmp_path / 'teacher'}" for name in load(recipe).config.teachers]
    cut = [1] if load(recipe).config.student.drop_layers else []
    overrides = [
        f"student.path={tmp_path / 'student'}",
        f"student.drop_layers={cut}",
        *teachers,
        f"out={tmp_path / 'runs'}",
        "threads=1",
        "steps=2",
        "prompts_per_step=2",
        "rollout={min_tokens: 4, max_tokens: 4}",
        "validation={prompts: 2, min_tokens: 4, max_tokens: 4}",
    ]
    assert main(["train", str(recipe), *overrides]) == 0
    run = tmp_path / "runs" / load(recipe).config.name
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    config = load(recipe).config
    expected = {"kl", "kl_fixed", "top1_agreement"} if config.teachers else set()
    expected |= {"reward"} if config.rewards else set()
    assert expected <= summary["eval"]["before"].keys() & summary["eval"]["after"].keys()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0


def prompts(name: str) -> list[str]:
    return [line["prompt"] for line in tiny.lines(RECIPES / "data" / name)]


def grams(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)} or {tuple(words)}


def test_held_out_prompts_are_held_out() -> None:
    train, heldout = prompts("train.jsonl"), prompts("heldout.jsonl")
    assert len(heldout) >= 64
    assert len(train) >= 200
    assert len(set(train)) == len(train)
    assert len(set(heldout)) == len(heldout)
    learned = set().union(*(grams(text, 8) for text in train))
    for text in heldout:
        assert not grams(text, 8) & learned, text
