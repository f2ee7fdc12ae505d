"""Certify every subject: compare its mean gradient with the exact one, and run all checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutelage.certify import textbook
from tutelage.certify.bench import Bench, Expected, World, aim, expectation, worlds
from tutelage.certify.checks import CHECKS, applies, relative
from tutelage.certify.ranks import two_processes
from tutelage.certify.subjects import SETTINGS, Subject, subjects

EXACT = 1e-6
"""Largest bias of a row that claims to be exact."""
BIASED = 1e-3
"""Smallest bias of a row that declares one."""
ALL_CHECKS = ("target", *CHECKS, "processes")


@dataclass(slots=True)
class Row:
    """A row of the table."""

    objective: str
    payload: str
    form: str
    discount: int | None
    target: str
    exact: bool
    """Whether the objective claims to be exact."""
    note: str
    bias: float | None = None
    """‖mean gradient − gradient of the target‖ / ‖gradient of the target‖."""
    bias_other: float | None = None
    """The same for the other target: `sequence` for `token`, and vice versa."""
    bias_full: float | None = None
    """For a payload with some tokens only: the bias relative to the divergence over all tokens."""
    checks: dict[str, bool] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """The reasons of failed checks."""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(self.checks.values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def add(self, check: str, reason: str) -> None:
        self.checks[check] = not reason
        if reason:
            self.reasons[check] = reason


def certify(
    names: Sequence[str] | None = None,
    *,
    only: Callable[[Subject], bool] = lambda subject: True,
    checks: Collection[str] = ALL_CHECKS,
    files: Sequence[str] = (),
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Certify some objectives by name, or everything that a recipe can use.

    `only` and `checks` restrict the subjects and checks. `files` are loaded by further processes to register the
    objectives. `done` is called with every finished row. A name without subjects gives a failed row.
    """
    found, missing = subjects(names)
    chosen = [subject for subject in found if only(subject)]
    shared = two_processes(chosen, names, files) if "processes" in checks else {}
    rows = [_missing(name, reason) for name, reason in missing.items()]
    for row in rows:
        done(row)
    for subject in chosen:
        row = _row(subject)
        for check in ALL_CHECKS:
            if check in checks and applies(check, subject):
                row.add(check, shared[subject.id] if check == "processes" else _caught(check, subject, row))
        rows.append(row)
        done(row)
    return rows


def _row(subject: Subject) -> Row:
    return Row(
        subject.objective,
        subject.payload,
        subject.form,
        subject.discount,
        subject.target,
        subject.exact,
        subject.note,
    )


def _missing(name: str, reason: str) -> Row:
    row = Row(name, "none", "none", None, "none", False, "nothing is known of it")
    row.add("listed", reason)
    return row


def _caught(check: str, subject: Subject, row: Row) -> str:
    """Run a check and return what is wrong; an exception counts as a failure."""
    try:
        return _target(subject, row) if check == "target" else CHECKS[check](subject)
    except Exception as error:  # a user's formula may raise anything
        return f"raised {type(error).__name__}: {error}"


# ── the target ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _target(subject: Subject, row: Row) -> str:
    bench = Bench.of(subject)
    found = worlds(bench)
    mean = expectation(bench, found)
    if not bool(torch.isfinite(mean.mean).all()):
        return "the mean gradient is not finite"
    if subject.aim is None:
        return _no_target(subject, row, mean, bench, found)
    target = aim(bench, found, subject.aim)
    row.bias = relative(mean.mean, target)
    if subject.other is not None:
        row.bias_other = relative(mean.mean, aim(bench, found, subject.other))
    if subject.full is not None:
        row.bias_full = relative(mean.mean, aim(bench, found, subject.full))
        row.note += f"; towards all tokens {row.bias_full:.2g} off"
    if subject.exact:
        return "" if row.bias <= EXACT else _wrong(row.bias, mean.mean, target, bench, found)
    row.note += f" (direction {_angle(mean.mean, target):.0f}° off)"
    return "" if row.bias > BIASED else f"a bias is declared, but it is only {row.bias:.2g}: this row is exact"


def _no_target(subject: Subject, row: Row, mean: Expected, bench: Bench, found: list[World]) -> str:
    """Check a subject without a target: its mean gradient is zero (exact), or that of no known divergence."""
    still = float(mean.mean.norm()) / mean.size if mean.size > 0 else 0.0
    if subject.exact:
        row.bias = still
        return "" if still <= EXACT else f"no gradient is claimed, but on average {still:.2g} of its size remains"
    nearest, row.bias = min(_distances(mean.mean, bench, found), key=lambda pair: pair[1])
    row.note += f"; nearest is {nearest}, {row.bias:.2g} off"
    if not subject.claimed or (row.bias > BIASED and still > BIASED):
        return ""
    return f"no divergence is claimed, but the mean gradient is {f'that of {nearest}' if still > BIASED else 'zero'}"


def _wrong(bias: float, mean: Tensor, target: Tensor, bench: Bench, found: list[World]) -> str:
    """Explain a wrong gradient: whether it is a multiple of the target or belongs to another known divergence."""
    reason = f"exact is claimed, but the mean gradient is {bias:.2g} off the target"
    factor = float(mean @ target / target.square().sum())
    if relative(mean, factor * target) <= EXACT and factor != 0:
        return f"{reason}: it is {factor:.4g} times the target"
    nearest, distance = min(_distances(mean, bench, found), key=lambda pair: pair[1])
    return f"{reason}: it is {nearest}" if distance <= EXACT else reason


def _distances(mean: Tensor, bench: Bench, found: list[World]) -> Iterable[tuple[str, float]]:
    for name in textbook.DIVERGENCES:
        states = textbook.at_states(textbook.divergence(name, SETTINGS))
        for where, scalar in (("at states", states), ("of sequences", textbook.of_sequences(name, SETTINGS))):
            yield f"{name} {where}", relative(mean, aim(bench, found, scalar))
    yield "nothing at all", float(mean.norm())


def _angle(one: Tensor, other: Tensor) -> float:
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=0).clamp(-1, 1)
    return float(torch.rad2deg(torch.acos(cosine)))
