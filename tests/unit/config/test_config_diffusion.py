"""Test the settings of diffusion runs: errors with key and reason, and that the shipped recipes load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from repository import ROOT
from tutelage.cli import main
from tutelage.config.diffusion import DRIFT, DiffusionConfig
from tutelage.config.load import ConfigError, load
from tutelage.config.tree import Mistake

RECIPES = ROOT / "recipes"
MINIMAL: dict[str, Any] = {
    "modality": "diffusion",
    "student": {"path": "models/painter"},
    "data": {"train": "prompts.jsonl"},
    "rollout": {"samples": 4, "steps": 10},
    "rewards": {"small": {"function": "jpeg_compressibility"}},
    "algorithm": {"name": "flow_grpo"},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def mistake(recipe: Path, *overrides: str) -> Mistake:
    """The only one that there is."""
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    [found] = caught.value.mistakes
    return found


def test_the_minimal_recipe_is_fine(recipe: Path) -> None:
    windows: dict[int, list[str]] = {9: [], 3: ["rollout.window=3", "rollout.window_range=[2,5]"]}
    for trained, overrides in windows.items():
        config = load(recipe, overrides).config
        assert isinstance(config, DiffusionConfig)
        assert config.rollout.trained == trained


REFUSED = {
    "range beyond the last step": (["rollout.window=2", "rollout.window_range=[0,10]"], "rollout", "the last step"),
    "empty range": (["rollout.window=2", "rollout.window_range=[4,4]"], "rollout", "(4, 4) lies outside of the 10"),
    "range below 0": (["rollout.window=2", "rollout.window_range=[-1,4]"], "rollout", "inside [0, 9)"),
    "window too large": (["rollout.window=10"], "rollout", "a window of 10 steps does not fit into the 9 steps"),
    "window larger than its range": (
        ["rollout.window=3", "rollout.window_range=[2,4]"],
        "rollout",
        "a window of 3 steps does not fit into the 2 steps",
    ),
    "cps beyond 1": (["rollout.sampler=cps", "rollout.noise_level=1.2"], "rollout", "0 to 1, got 1.2"),
    "clip below the drift": (["algorithm.clip=1e-6"], "algorithm.clip", "the clip would act on noise"),
    "bf16 latents": (["rollout.latents=bfloat16"], "rollout.latents", "changes log-probs by more than an update does"),
    "negative noise": (["rollout.noise_level=-0.1"], "rollout.noise_level", "at least 0"),
    "guidance below 1": (["rollout.guidance=0.5"], "rollout.guidance", "at least 1"),
    "cached scores": (
        ["teachers.main={path: models/master, cache: true}"],
        "teachers.main.cache",
        "scores of denoising steps are not cached, only those of tokens: remove the key",
    ),
    "one step": (["rollout.steps=1"], "rollout.steps", "at least 2"),
    "negative kl": (["algorithm.kl=-1"], "algorithm.kl", "at least 0"),
    "ema of 1": (["optimizer.ema=1"], "optimizer.ema", "below 1"),
    "unknown key": (["rollout.windw=3"], "rollout.windw", "did you mean rollout.window?"),
    "key of text": (["rollout.max_tokens=3"], "rollout.max_tokens", "unknown key"),
    "key of another algorithm": (["algorithm.beta=3"], "algorithm.beta", "algorithm flow_grpo has no such key"),
    "unknown algorithm": (["algorithm.name=flow_grop"], "algorithm.name", "flow_grpo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_with_its_reason(recipe: Path, case: str) -> None:
    overrides, key, reason = REFUSED[case]
    found = mistake(recipe, *overrides)
    assert found.key == key
    assert reason in str(found)


CONTRADICTIONS = {
    "no noise, log-probs": (["rollout.noise_level=0"], ["rollout.noise_level is 0", "no log-probs", "diffusion_nft"]),
    "one sample": (["rollout.samples=1"], ["rollout.samples must be at least 2", "algorithm.baseline none"]),
    "no rewards": (["rewards=null"], ["learns from rewards", "under rewards"]),
    "a teacher nobody asks": (["teachers.main.path=x"], ["reads no teachers", "use distill"]),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused(recipe: Path, case: str) -> None:
    overrides, reasons = CONTRADICTIONS[case]
    said = str(mistake(recipe, *overrides))
    assert all(reason in said for reason in reasons), said


def test_what_the_refusals_leave_open(recipe: Path) -> None:
    for overrides in (
        ["algorithm.kl=0.1"],
        ["algorithm.kl=0.1", "student.lora.rank=4"],
        ["rollout.samples=1", "algorithm.baseline=none"],
        ["rollout.noise_level=0", "algorithm.name=diffusion_nft"],
        [f"algorithm.clip={DRIFT}"],
    ):
        load(recipe, overrides)


def test_distillation_needs_a_teacher_and_many_need_a_column(recipe: Path) -> None:
    distill = ["algorithm.name=distill", "rewards=null"]
    assert "needs a teacher" in str(mistake(recipe, *distill))
    load(recipe, [*distill, "teachers.one.path=x"])
    two = [*distill, "teachers.one.path=x", "teachers.two.path=y"]
    assert "2 teachers need data.teacher_column" in str(mistake(recipe, *two))
    load(recipe, [*two, "data.teacher_column=who"])
    without_noise = mistake(recipe, *distill, "teachers.one.path=x", "rollout.noise_level=0")
    assert "rollout.noise_level is 0" in str(without_noise)


SHIPPED = sorted(path.name for path in RECIPES.glob("*digits*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_load_and_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(RECIPES / name).config
    assert isinstance(config, DiffusionConfig)
    assert config.rollout.samples * config.prompts_per_step <= config.engine.slots, "one tick holds the whole step"
    assert main(["config", "show", str(RECIPES / name), "--plain"]) == 0
    shown = capsys.readouterr().out
    assert "rollout.steps" in shown
    assert ("rollout.sampler" in shown) == (config.algorithm.name != "diffusion_nft")


def test_shipped_recipes_are_there() -> None:
    assert {"flow_grpo_digits.yaml", "nft_digits.yaml", "distill_digits.yaml"} <= set(SHIPPED)
