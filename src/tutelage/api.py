"""The short way in: distil a student on prompts, without a recipe file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutelage.config.schema import Config
from tutelage.loop import train
from tutelage.record.lock import locked
from tutelage.record.run_directory import RunDirectory


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

        tutelage.distill("path/to/student", "path/to/teacher", ["Why is the sky blue?", …], steps=50,
                           optimizer={"lr": 5e-5})

    A model is a path, or a section as in a recipe. `prompts` and `heldout` are a file (JSONL, Parquet, dataset
    directory) or the prompts themselves. Anything else that a recipe can say goes into `settings`, by section.
    """
    directory = Path(out) / name
    given = {"train": prompts} if heldout is None else {"train": prompts, "validation": heldout}
    names = {"train": "prompts.jsonl", "validation": "heldout.jsonl"}
    data = {key: rows if isinstance(rows, str) else str(directory / names[key]) for key, rows in given.items()}
    base: dict[str, Any] = {
        "name": name,
        "out": out,
        "student": _section(student),
        "teachers": {"teacher": _section(teacher)},
        "data": data,
    }
    for section, value in settings.items():
        base[section] = {**base.get(section, {}), **value} if isinstance(value, dict) else value
    config = Config.model_validate(base)
    with locked(directory):
        RunDirectory(directory).require_free()
        for key, rows in given.items():
            if not isinstance(rows, str):
                _write(Path(data[key]), rows)
    return train(config)


def _section(model: str | dict[str, Any]) -> dict[str, Any]:
    return {"path": model} if isinstance(model, str) else model


def _write(path: Path, prompts: Sequence[str]) -> None:
    """A list of prompts is kept beside the run, so that it can be resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
