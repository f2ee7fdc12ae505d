"""Test the temperatures of student, teachers and reference in training and evaluation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tutelage import loop
from tutelage.algorithms.build import build_algorithm
from tutelage.config.schema import Config
from tutelage.data.trajectory import Key
from tutelage.engines.contract import ScoreRequest, Want
from tutelage.engines.torch_lm import TorchEngine
from tutelage.modality import text_models as build

VOCABULARY = 270
TOKENS = torch.tensor([3, 14, 15, 9, 2, 6, 5, 35])
GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": 0.1},
    "teachers": None,
    "rewards": {"right": {"function": "exact_match"}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and its teacher."""
    root = tmp_path_factory.mktemp("models")
    tiny.settings(root)
    return root


def config(root: Path, student: float, teacher: float | str = 1.0, **sections: Any) -> Config:
    settings = tiny.settings(root, rollout={"temperature": student, "samples": 2}, **sections)
    if settings["teachers"] is None:
        settings["teachers"] = {}
    else:
        settings["teachers"]["main"]["temperature"] = teacher
    return Config.model_validate(settings)


def expected(model: Path, temperature: float) -> Tensor:
    """Log-probs [tokens - 1, vocabulary] from transformers alone."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(TOKENS[None]).logits[0, :-1]
    return torch.log_softmax(logits / temperature, dim=-1)


def taken(log_probs: Tensor) -> Tensor:
    return log_probs.gather(-1, TOKENS[1:, None]).squeeze(-1)


def scored(engine: TorchEngine, want: Want) -> Any:
    async def ask() -> Any:
        request = ScoreRequest(Key("train", 0, 0, 0, 0), TOKENS, ((1, len(TOKENS)),), want, "main")
        answer = asyncio.create_task(engine.score(request))
        while not answer.done():
            await asyncio.sleep(0)
            engine.score_batch()
        return await answer

    return asyncio.run(ask())


# ── who takes which ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("student", "teacher", "training", "evaluation"),
    [(1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 1.0, 1.0), (1.0, 2.0, 2.0, 2.0), (0.5, 2.0, 2.0, 2.0), (0.5, "match", 0.5, 1.0)],
)
def test_a_teacher_has_its_own_temperature_unless_it_matches(
    models: Path, student: float, teacher: float | str, training: float, evaluation: float
) -> None:
    """In the head that expands hidden states, and in the engine that scores tokens."""
    chosen = config(models, student, teacher)
    model = build.teacher_model(chosen, "main")
    engine = build.teacher_engine(chosen, "main", VOCABULARY, "cpu", lambda: model)
    head = build.teacher_head(chosen, "main", model.head, VOCABULARY)
    scores = scored(engine, Want(sampled=True, hidden=True))
    for temperature, found in ((training, head.log_probs), (evaluation, head.neutral().log_probs)):
        torch.testing.assert_close(found(scores.hidden), expected(models / "teacher", temperature), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.logp, taken(expected(models / "teacher", training)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_reference_has_the_students_temperature(models: Path, temperature: float) -> None:
    engine = build.reference_engine(config(models, temperature, **GRPO), VOCABULARY)
    scores = scored(engine, Want(sampled=True))
    torch.testing.assert_close(scores.logp, taken(expected(models / "student", temperature)), atol=1e-4, rtol=0)


# ── what is said and refused ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("student", "teacher", "said"),
    [
        (1.0, 1.0, ""),
        (0.5, 0.5, ""),
        (0.5, "match", ""),
        (0.0, 1.0, ""),
        (0.5, 1.0, "the student is taken at 0.5 (rollout.temperature), teacher main at 1"),
        (1.0, 2.0, "the student is taken at 1 (rollout.temperature), teacher main at 2"),
        (0.0, 2.0, "the student is taken at 1 (rollout.temperature), teacher main at 2"),
    ],
)
def test_the_first_line_says_where_temperatures_differ(
    models: Path, student: float, teacher: float | str, said: str
) -> None:
    note = build_algorithm(config(models, student, teacher)).note
    assert ("temperatures differ" in note) == bool(said)
    assert said in note


def test_nothing_matches_by_default(models: Path) -> None:
    settings = tiny.settings(models, rollout={"temperature": 0.5})
    assert Config.model_validate(settings).teacher_temperature("main") == 1.0


@pytest.mark.parametrize(
    ("student", "teacher", "said"),
    [
        (0.0, "match", "teachers.main.temperature: match needs a rollout.temperature above 0"),
        (1.0, 0.0, "must be a number above 0, or match for the student's temperature, got 0.0"),
        (1.0, "same", "must be a number above 0, or match for the student's temperature, got 'same'"),
        (1.0, True, "must be a number above 0, or match"),
        (1.0, float("inf"), "must be a number above 0, or match"),
        (1.0, float("nan"), "must be a number above 0, or match"),
    ],
)
def test_temperatures_that_are_none_are_refused(models: Path, student: float, teacher: Any, said: str) -> None:
    with pytest.raises(ValueError, match="temperature") as caught:
        config(models, student, teacher)
    assert said in str(caught.value)
    assert str(caught.value).startswith("1 validation error")


def test_a_student_that_is_its_teacher_stands_still_at_a_matched_temperature_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kl = {}
    for teacher in ("match", 1.0):
        settings = tiny.settings(
            tmp_path,
            name=f"at-{teacher}",
            steps=2,
            rollout={"temperature": 0.5},
            teachers={"main": {"path": str(tmp_path / "student"), "dtype": "float32", "temperature": teacher}},
        )
        run = loop.train(Config.model_validate(settings))
        summary = json.loads((run / "summary.json").read_text())
        kl[teacher] = [summary["eval"][when]["kl"] for when in ("before", "after")]
        said = " ".join(capsys.readouterr().out.split())
        assert ("temperatures differ" in said) == (teacher != "match")
        assert ("temperatures differ" in summary["objective"]) == (teacher != "match")
    assert max(kl["match"]) < 1e-6
    assert kl[1.0][0] < 1e-6
    assert kl[1.0][1] > 0.005
