"""Run every script of examples/, and compare the flat loop with the package."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiny
import tutelage
from repository import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


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
