"""The short way in: distil a student on prompts, without a recipe file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.config.schema import Config
from understudy.record.run_directory import RunDirectory
from understudy.train import train


def distill(
    student: str | dict[str, Any],
    teacher: str | dict[str, Any],
    prompts: str | Sequence[str],
    *,
    heldout: str | Sequence[str] | None = None,
    name: str = "distill",
    out: str = "runs",
    **settings: Any,
) -> Path:
    """On-policy distillation of `student` from `teacher`; returns the run's directory.

        understudy.distill("path/to/student", "path/to/teacher", ["Why is the sky blue?", …], steps=50,
                           optimizer={"lr": 5e-5})

    A model is a path, or a section as in a recipe. `prompts` and `heldout` are a file (JSONL, Parquet, dataset
    directory) or the prompts themselves. Anything else that a recipe can say goes into `settings`, by section.
    """
    directory = Path(out) / name
    RunDirectory(directory).require_free()
    data = {"train": _file(prompts, directory, "prompts")}
    if heldout is not None:
        data["validation"] = _file(heldout, directory, "heldout")
    base: dict[str, Any] = {
        "name": name,
        "out": out,
        "student": _section(student),
        "teachers": {"teacher": _section(teacher)},
        "data": data,
    }
    for section, value in settings.items():
        base[section] = {**base.get(section, {}), **value} if isinstance(value, dict) else value
    return train(Config.model_validate(base))


def _section(model: str | dict[str, Any]) -> dict[str, Any]:
    return {"path": model} if isinstance(model, str) else model


def _file(prompts: str | Sequence[str], directory: Path, name: str) -> str:
    """A file as it is; a list of prompts is kept beside the run, so that it can be resumed."""
    if isinstance(prompts, str):
        return prompts
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return str(path)
