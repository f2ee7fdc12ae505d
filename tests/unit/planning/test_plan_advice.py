"""What a plan advises where memory is short, and a model that two teachers name: loaded once, counted once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tiny
from tutelage.assemble import assemble
from tutelage.backends.inline import InlineBackend
from tutelage.config.schema import Config
from tutelage.loop import train
from tutelage.modality import text_models
from tutelage.planning import plan as planning
from tutelage.planning.memory import Item, how_to_lower
from tutelage.planning.plan import plan, show


def warning(config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a machine with a kilobyte says."""
    monkeypatch.setattr(planning, "available_memory", lambda: 1000)
    capsys.readouterr()
    show(plan(config))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    return line


@pytest.mark.parametrize(
    ("sections", "term", "lower"),
    [
        (
            {"prompts_per_step": 5000, "rollout": {"max_tokens": 500}},
            "columns of a step",
            "lower prompts_per_step, rollout.samples or rollout.max_tokens",
        ),
        ({"engine": {"slots": 9999, "context": 9999}}, "key-value cache", "lower engine.slots or engine.context"),
        ({"optimizer": {"logit_tokens": 10**6}}, "logits of a chunk", "lower optimizer.logit_tokens"),
        (
            {"optimizer": {"micro_batch_tokens": 10**7}, "data": {"max_prompt_tokens": 10**6}},
            "activations",
            "lower optimizer.micro_batch_tokens, or set learner.activation_checkpointing=true",
        ),
    ],
)
def test_the_largest_term_is_named_with_what_lowers_it(
    sections: dict[str, Any],
    term: str,
    lower: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny.config(tmp_path, **sections)
    said = warning(config, monkeypatch, capsys)
    assert f"; the largest term is {term} (" in said
    assert said.endswith(f": {lower}")
    before = {item.name: item.bytes for item in plan(config).memory}
    assert before[term] == max(size or 0 for size in before.values())


def test_there_is_advice_about_every_term(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    ppo = {"name": "ppo", "kl": 0.1}
    wide = {"samples": 2, "max_tokens": 4}
    settings = {**tiny.settings(tmp_path), "algorithm": ppo, "rollout": wide, "teachers": {}}
    settings["rewards"] = {"short": {"function": "pattern", "options": {"patterns": ["x"]}}}
    settings["student"] = {"path": str(tmp_path / "student"), "dtype": "bfloat16"}
    rewarded = plan(Config.model_validate(settings)).memory
    names = {item.name for item in (*rewarded, *plan(tiny.config(tmp_path)).memory)}
    assert {"critic", "reference weights", "kept prompts", "student masters", "teacher main weights"} <= names
    ways = {name: how_to_lower(Item(name, 1, "")) for name in names}
    assert "smaller teacher" in ways["teacher main weights"]
    assert "student.lora" in ways["student optimizer"]
    assert "algorithm.kl=0" in ways["reference weights"]


# ── one model, two teachers ──────────────────────────────────────────────────────────────────────────────────────────


def two_teachers(root: Path, second: dict[str, Any], **sections: Any) -> Config:
    rows = [{"prompt": prompt, "who": who} for prompt, who in zip(tiny.PROMPTS, "abc" * 2, strict=True)]
    tiny.save(root / "other", seed=1)
    path = str(root / "teacher")
    teachers = {
        "a": {"path": path, "dtype": "float32"},
        "b": {"path": path, "dtype": "float32", **second},
        "c": {"path": str(root / "other"), "dtype": "float32"},
    }
    settings = {**tiny.settings(root, **sections), "teachers": teachers}
    file = str(tiny.write_prompts(root / "routed.jsonl", rows))
    settings["data"] = {"train": file, "validation": file, "teacher_column": "who"}
    return Config.model_validate(settings)


@pytest.mark.parametrize(
    ("second", "shared"),
    [({"temperature": 0.5}, True), ({"path": "{root}/./teacher"}, True), ({"dtype": "bfloat16"}, False)],
)
def test_a_model_that_two_teachers_name_is_loaded_and_counted_once(
    second: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    second = {key: value.format(root=tmp_path) if key == "path" else value for key, value in second.items()}
    config = two_teachers(tmp_path, second)
    notes: list[str] = []
    backend = assemble(config, notes.append).backend
    assert isinstance(backend, InlineBackend)
    models = {name: engine.model.model for name, engine in backend.teachers.items()}
    assert (models["a"] is models["b"]) == shared
    assert models["a"] is not models["c"]
    assert ("teachers.b: the model of teachers.a, which is loaded once" in notes) == shared
    found = {item.name: item for item in plan(config).memory}
    one = sum(parameter.numel() * 4 for parameter in models["a"].parameters())
    assert found["teacher a weights"].bytes == found["teacher c weights"].bytes == one
    assert found["teacher b weights"].bytes == (0 if shared else one // 2)
    assert bool(re.search("the model of teacher a, which is loaded once", found["teacher b weights"].how)) == shared


def test_sharing_a_model_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = train(two_teachers(tmp_path, {"temperature": 0.5}, name="shared"))
    monkeypatch.setattr(text_models, "model_owners", lambda teachers: {name: name for name in teachers})
    apart = train(two_teachers(tmp_path, {"temperature": 0.5}, name="apart"))
    assert tiny.same(tiny.weights(shared), tiny.weights(apart))
    assert tiny.lines(shared / "validation.jsonl") == tiny.lines(apart / "validation.jsonl")
