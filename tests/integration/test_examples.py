"""Run every script of examples/, and compare the flat loop with the package."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiny
import tutelage
from repository import ROOT
from tutelage.toys import digits

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
PAIR = ["--student", "{student}", "--teacher", "{teacher}"]
ARGUMENTS = {
    "distill": [*PAIR, "--prompts", "{prompts}.jsonl"],
    "flat_loop": [*PAIR, "--prompts", "{prompts}.txt"],
    "grpo": ["{student}"],
    "images": ["{digits}"],
    "lora": PAIR,
    "own_loop": ["{student}"],
    "two_teachers": ["--student", "{student}", "--teachers", "{teacher}", "{student}"],
}
"""The arguments of each script, with tiny models in place of those that it would train here first."""
LAST_LINES = {
    "distill": r"held-out KL.*: [\d.]+ nats per token before, [\d.]+ after\nthe trained model: runs/distill/model",
    "flat_loop": r"step 1: loss [\d.]+\nafter: held-out KL [\d.]+, e\.g\. '.*",
    "grpo": r"right answers to held-out prompts: \d+% before, \d+% after",
    "images": r"right digits by the judge: \d+% before, \d+% after\nopen runs/images/report.html for the images",
    "lora": r"trained [\d,]+ of [\d,]+ parameters\nheld-out KL.* after\nthe adapter: runs/lora/adapter",
    "own_loop": r"right totals of held-out rows: \d+% before, \d+% after",
    "two_teachers": r"forgets +1 +[\d.]+ +\d+%\nheld-out KL.*: [\d.]+ nats per token before, [\d.]+ after",
}
"""What each script prints at its end."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models and a few prompts."""
    root = tmp_path_factory.mktemp("examples")
    (root / "digits").mkdir()
    digits.build(root / "digits", seed=0, recipe=replace(digits.RECIPE, steps=1))
    (root / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in tiny.PROMPTS))
    tiny.write_prompts(root / "prompts.jsonl")
    models = {"student": tiny.save(root / "student", seed=1), "teacher": tiny.save(root / "teacher", seed=2)}
    return {**models, "digits": root / "digits", "prompts": root / "prompts"}


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(ARGUMENTS) == set(LAST_LINES)
    table = (EXAMPLES / "README.md").read_text()
    assert {name for name in scripts if f"[`{name}.py`]({name}.py)" in table} == scripts


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_runs_for_a_step(name: str, given: dict[str, Path], tmp_path: Path) -> None:
    arguments = [argument.format_map(given) for argument in ARGUMENTS[name]]
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments, "--steps", "1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(LAST_LINES[name] + r"\n$", ran.stdout), ran.stdout


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("template", ["chat", "none"])
def test_the_first_step_of_the_flat_loop_is_that_of_the_package(tmp_path: Path, template: str) -> None:
    """To the last bit: same packs, same loss, same order of sums. AdamW would blow up any difference: its first step
    divides each gradient by its own size."""
    torch.set_num_threads(1)
    student, teacher = tiny.save(tmp_path / "student", seed=1), tiny.save(tmp_path / "teacher", seed=2)
    if template == "none":
        (student / "chat_template.jinja").unlink()
    flat = imported("flat_loop")
    prompts = [f"{prompt} {number}" for prompt in tiny.PROMPTS for number in range(8)]
    model, losses = asyncio.run(flat.distill(str(student), str(teacher), prompts, ["Hi."], steps=1, max_tokens=12))
    run = tutelage.distill(
        {"path": student, "dtype": "float32"},
        {"path": teacher, "dtype": "float32"},
        prompts,
        out=tmp_path / "runs",
        seed=flat.SEED,
        steps=1,
        threads=1,
        prompts_per_step=flat.PROMPTS_PER_STEP,
        data={"shuffle": False, "template": template},
        rollout={"max_tokens": 12},
        optimizer={"lr": flat.LR, "logit_tokens": 10_000, "micro_batch_tokens": 10_000},
    )
    before, trained = tutelage.load_model(student)[0].model.state_dict(), run.model().state_dict()
    assert losses == [pytest.approx(run.metrics[0]["loss"], abs=1e-7)]
    for name, weight in model.model.state_dict().items():
        assert torch.equal(weight, trained[name]), name
        assert not torch.equal(weight, before[name]), name
