"""Which settings may change when a run is resumed: those that do not affect the results so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tutelage.config.load import leaves, load
from tutelage.config.schema import RunConfig
from tutelage.config.tree import inline_yaml
from tutelage.errors import UserError

EXACT = (
    "steps",
    "data.overlong",
    "validation.every",
    "checkpoint.every",
    "checkpoint.keep",
    "record.rollouts",
    "record.writers",
    "rollout.max_failed_groups",
    "ray.address",
    "ray.cpus",
    "ray.deadline",
    "ray.request_deadline",
    "ray.publish_deadline",
    "ray.restarts",
    "teachers.*.url",
    "teachers.*.key_env",
    "teachers.*.max_in_flight",
    "teachers.*.deadline",
)
"""Settings that do not affect results: the length of the run, what it records, when it gives up, where a server is.
This includes data.overlong, because rows are skipped as they are drawn, and a run that stops at such a row has drawn
none."""
TO_ROUNDING = (
    "device",
    "threads",
    "engine.slots",
    "engine.score_every",
    "optimizer.micro_batch_tokens",
    "optimizer.micro_batch_steps",
    "optimizer.logit_tokens",
    "teachers.*.batch_tokens",
    "teachers.*.batch_steps",
    "teachers.*.cache",
    "teachers.*.cache_gb",
    "pools.*",
    "ray.queue",
)
"""Settings that affect results only by rounding, because they change the order of sums: how work is split and where it
runs."""
ONLY_NULL = ("data.validation",)
"""Settings that may only become null: a run may drop its evaluation, but not change it."""


def load_resumed(recipe: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the settings of a run with the overrides applied, and notes about the changes.

    Raises UserError if a setting may not change.
    """
    before = load(recipe).config
    if not overrides:
        return before, []
    after = load(recipe, overrides).config
    changed = list(_changes(before, after))
    refused = [key for key, _, new in changed if not _may_change(key, new)]
    if refused:
        raise UserError(
            f"{', '.join(refused)}: cannot change in a run that has begun, because what it has done so far would have "
            f"come out differently; start a new run for that. What may change: {', '.join((*EXACT, *TO_ROUNDING))}; "
            f"and {', '.join(ONLY_NULL)} may become null"
        )
    notes = [f"changed for the rest of the run: {key} = {_yaml(new)} (was {_yaml(old)})" for key, old, new in changed]
    if rounded := [key for key, _, _ in changed if _matches(key, TO_ROUNDING)]:
        notes.append(
            f"{', '.join(rounded)}: from here on, results agree with those of an unchanged run to rounding only"
        )
    if before.steps != after.steps and before.optimizer.schedule != "constant":
        notes.append(
            f"optimizer.schedule is {before.optimizer.schedule}: the learning rate now follows its course over "
            f"{after.steps} steps; the steps made so far followed one over {before.steps}"
        )
    return after, notes


def _may_change(key: str, new: Any) -> bool:
    return _matches(key, (*EXACT, *TO_ROUNDING)) or (key in ONLY_NULL and new is None)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _changes(before: RunConfig, after: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, old value and new value of every setting that differs. A setting that exists on one side only is
    None on the other."""
    old, new = ({".".join(path): value for path, value, _ in leaves(config)} for config in (before, after))
    for key in dict.fromkeys((*old, *new)):
        if key not in old or key not in new or old[key] != new[key]:
            yield key, old.get(key), new.get(key)


def _yaml(value: Any) -> str:
    return inline_yaml(list(value) if isinstance(value, tuple) else value)
