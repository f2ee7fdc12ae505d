"""The model card of an export: what the run says about how the model was made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tutelage import __version__
from tutelage.config.measures import in_order, measure
from tutelage.config.schema import RunConfig
from tutelage.config.start import is_hub_id
from tutelage.errors import UserError

CARD = "README.md"


def model_card(run: Path, config: RunConfig, step: int, library: str, weights: str) -> str:
    """Markdown about the checkpoint of a step. `library` loads the export; `weights` says which ones it has."""
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _facts(run, config, step, weights))
    return f"""---
{_base(config)}library_name: {library}
tags: [tutelage]
---

# {config.name}

A student that was trained on its own outputs and exported by tutelage {__version__}.

| | |
|---|---|
{rows}

## Held-out measures

{_measures(run, step)}

## Licence

To be filled in. The licences of the base model, of the teachers and of the data may bind this model too.
"""


def _base(config: RunConfig) -> str:
    """Cards name base models that the hub has."""
    path = config.student.path
    return f"base_model: {path}\n" if is_hub_id(path) and not Path(path).exists() else ""


def _facts(run: Path, config: RunConfig, step: int, weights: str) -> Iterator[tuple[str, str]]:
    cut = config.student.model_dump().get("drop_layers")
    layers = f", without decoder layers {', '.join(map(str, cut))}" if cut else ""
    yield "base model", f"`{config.student.path}`{layers}"
    yield "weights", weights
    yield "objective", _read(run / "summary.json").get("objective") or _objective(config)
    if config.teachers:
        yield "teachers", ", ".join(f"{name} (`{teacher.source}`)" for name, teacher in config.teachers.items())
    if config.rewards:
        named = (f"{name} ({reward.function}, weight {reward.weight:g})" for name, reward in config.rewards.items())
        yield "rewards", ", ".join(named)
    data = _read(run / "data.json")
    yield "training prompts", f"`{config.data.train}`{_rows(data.get('train'))}"
    if config.data.validation is not None:
        yield "held-out prompts", f"`{config.data.validation}`{_rows(data.get('heldout'))}"
    each = f"{config.prompts_per_step} prompts × {config.rollout.samples} samples each"
    yield "steps", f"{step} of {config.steps}, {each}"
    yield "seed", str(config.seed)


def _objective(config: RunConfig) -> str:
    said = config.algorithm.model_dump().get("objective")
    return f"{config.algorithm.name}, {said}" if said else config.algorithm.name


def _rows(data: Mapping[str, Any] | None) -> str:
    return f" ({data['rows']:,} rows)" if data else ""


def _measures(run: Path, step: int) -> str:
    """A table of the first evaluation and of the last one up to the checkpoint's step."""
    found = {row["step"]: row for row in _lines(run / "validation.jsonl") if row["step"] <= step}
    if not found:
        return "The run was not evaluated."
    first, last = found[min(found)], found[max(found)]
    columns = [first] if first is last else [first, last]
    titles = [f"step {row['step']}" if row["step"] else "before training" for row in columns]
    lines = [f"| measure | {' | '.join(titles)} |", "|---" * (1 + len(columns)) + "|"]
    for name in in_order(key for key in last if key not in ("step", "nonfinite")):
        unit = f", {known.unit}" if (known := measure(name)).unit else ""
        values = " | ".join(_number(row.get(name)) for row in columns)
        lines.append(f"| {_cell(known.label)}{unit} | {values} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that a run may be writing."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [_parse(line, path) for line in whole.splitlines() if line.strip()]


def _read(path: Path) -> dict[str, Any]:
    return _parse(path.read_text(encoding="utf-8"), path) if path.exists() else {}


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). It was changed by something else; remove it.") from error
    return content
