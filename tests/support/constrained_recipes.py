"""Runs of tiny models whose answers follow constraints, by loops and rewards of a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from repository import ROOT
from tutelage.config.schema import Config
from tutelage.record import RunDirectory

PLUGIN = ROOT / "tests" / "support" / "constrained_loops.py"


def sections(**changed: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "plugins": [str(PLUGIN)],
        "rollout": {"agent_loop": "constrained_some", "max_tokens": 40, "samples": 2},
        "validation": {"max_tokens": 40, "prompts": 6},
        "record": {"rollouts": "all"},
    }
    for name, value in changed.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def config(root: Path, name: str, *, taught: bool, **changed: Any) -> Config:
    """`taught`: with the teacher of `tiny.settings`; otherwise with a reward."""
    settings = tiny.settings(root, name=name, **sections(**changed))
    if not taught or settings.get("algorithm", {}).get("task_weight"):
        settings["rewards"] = {"length": {"function": "constrained_letters"}}
    if not taught:
        settings["teachers"] = {}
    return Config.model_validate(settings)


def texts(run: Path) -> list[str]:
    directory = RunDirectory.open(run)
    steps = [line["step"] for line in tiny.lines(run / "metrics.jsonl")]
    return ["".join(row.pieces) for step in steps for row in directory.load_rollouts(step)]
