"""Checks that every objective must pass. A check takes a subject and returns what is wrong, or "".

Inputs come from seeded generators: rows of many lengths, tool tokens between actions, groups, an episode of two
trajectories, and a sampler that differs slightly from the learner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from tutelage.certify.bench import LIMITS, Bench, trainable
from tutelage.certify.scene import Rows, constrain, ragged, shaped, view
from tutelage.certify.subjects import Subject
from tutelage.certify.toy import RARE, TEMPERATURE, Cast, Toy
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.learner import step as learning
from tutelage.learner import update

SAME = 1e-6
"""Largest difference of gradients that should be equal, relative to their norm."""
DRAWS = 2
NEARLY = 1e-6
"""Difference in the logits of one token between the student and a teacher that is almost equal to it."""
STEP = 1e-6
"""Step size of finite differences."""
Check = Callable[[Subject], str]


def relative(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖, or ‖found‖ if `expected` is zero."""
    size = float(expected.norm())
    return float((found - expected).norm()) / (size if size > 0 else 1.0)


def _differs(what: str, found: Tensor, expected: Tensor, tolerance: float = SAME) -> str:
    if not bool(torch.isfinite(found).all()):
        return f"{what}: the gradient is not finite"
    gap = relative(found, expected)
    return f"{what}: the gradient differs by {gap:.2g}" if gap > tolerance else ""


def _first(*found: str) -> str:
    return next((reason for reason in found if reason), "")


# ── the same gradient for any split of the work ──────────────────────────────────────────────────────────────────────


def plain(subject: Subject) -> str:
    """Packs, chunks, fused formulas and a training step agree with the plain formula on padded sequences."""
    bench = Bench.of(subject)
    rows = [bench.rows(ragged(seed)) for seed in range(DRAWS)]
    return _first(*(_as_plain(bench, own, f"rows {seed}") for seed, own in enumerate(rows)), _step(bench))


def _as_plain(bench: Bench, rows: Rows, what: str) -> str:
    prepared = bench.prepared(bench.batch(rows))
    seen = view(bench.cast, rows)
    expected = bench.textbook(bench.subject.plain, seen)
    value, wanted = bench.value(prepared), float(bench.subject.plain(seen).detach())
    reason = _differs(f"{what}, against the plain formula", bench.gradient(prepared), expected)
    if not reason and bench.subject.smooth and abs(value - wanted) > SAME * max(1.0, abs(wanted)):
        return f"{what}: the loss is {value:.8g}, by the plain formula {wanted:.8g}"
    return reason


def _step(bench: Bench) -> str:
    """With plain gradient descent, learning rate 1 and no clipping, an update changes the weights by minus the
    gradient."""
    prepared = bench.prepared(bench.batch(bench.rows(ragged(DRAWS))))
    expected = bench.gradient(prepared)
    learner = trainable(bench.learner)
    before = [parameter.detach().clone() for parameter in learner.parameters]
    update.update(learner.model, learner.optimizer, prepared, bench.losses, LIMITS, torch.inf, learner.parameters)
    moved = [(was - now.detach()).flatten() for was, now in zip(before, learner.parameters, strict=True)]
    for parameter, was in zip(learner.parameters, before, strict=True):
        parameter.data.copy_(was)
    return _differs("an update", torch.cat(moved), expected)


def splits(subject: Subject) -> str:
    """The gradient does not depend on micro-batches, chunks or the order of rows."""
    bench = Bench.of(subject)
    generator = torch.Generator().manual_seed(0)
    for seed in range(DRAWS):
        prepared = bench.prepared(bench.batch(bench.rows(ragged(seed))))
        expected = bench.gradient(prepared, replace(LIMITS, micro_batch_tokens=10**6, logit_tokens=10**6))
        for tokens, chunk in ((1, 1), (17, 3), (10**6, 2)):
            limits = replace(LIMITS, micro_batch_tokens=tokens, logit_tokens=chunk)
            order = torch.randperm(len(prepared), generator=generator).tolist()
            what = f"rows {seed} in order {order}, micro-batches of {tokens} tokens, {chunk} logits at a time"
            reason = _differs(what, bench.gradient(prepared.select(order), limits), expected)
            if reason:
                return reason
    return ""


def layouts(subject: Subject) -> str:
    """The gradient is the same for columns that were padded or converted to jagged nested tensors."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # nested tensors trigger its log messages
    bench = Bench.of(subject)
    given = bench.batch(bench.rows(ragged(0)))
    expected = bench.gradient(bench.prepared(given))

    def padded(column: Ragged) -> Ragged:
        return Ragged.from_padded(column.to_padded(0), column.lengths)

    def nested(column: Ragged) -> Ragged:
        return Ragged.from_nested(column.to_nested())

    return _first(
        *(
            _differs(change.__name__, bench.gradient(bench.prepared(_changed(given, change))), expected, 0.0)
            for change in (padded, nested)
        )
    )


def _changed(batch: Batch, change: Callable[[Ragged], Ragged]) -> Batch:
    return replace(batch, columns={name: change(column) for name, column in batch.columns.items()})


# ── several updates of one batch ─────────────────────────────────────────────────────────────────────────────────────

MOVE = 0.1
"""Norm of the weight change between updates, which changes log-probs by a few tenths."""


def updates(subject: Subject) -> str:
    """Every update of a step has the gradient of the plain formula over its rows, at the weights after the earlier
    updates. Quantities of the weights before the first update stay fixed."""
    assert subject.each is not None
    cast = Cast()
    bench = Bench.of(subject, replace(cast, before=deepcopy(cast.student)))
    rows = bench.rows(ragged(6))
    student = trainable(cast.student)
    critic = trainable(cast.critic) if bench.algorithm.critic_losses else None
    prepared, _ = learning.prepare(bench.algorithm, student, critic, bench.batch(rows), LIMITS)
    seen, parts = view(bench.cast, rows), list[list[int]]()
    for work in learning.updates(bench.algorithm, student, critic, prepared, subject.schedule):
        if work.trainable is not student:
            continue
        parts.append(work.rows)
        here = torch.isin(seen.row, torch.tensor(work.rows))
        each = subject.each(view(bench.cast, rows))
        expected = bench.textbook(lambda _, each=each, here=here: each[here].sum() / here.sum(), seen)  # type: ignore[misc]
        gradient = bench.gradient(work.batch)
        if reason := _differs(f"update {len(parts)}", gradient, expected):
            return reason
        for parameter, slope in zip(student.parameters, _parts(gradient, student.parameters), strict=True):
            parameter.data.sub_(MOVE * slope / gradient.norm())
    return _dealt(parts, len(prepared), subject)


def _dealt(parts: list[list[int]], rows: int, subject: Subject) -> str:
    """Every epoch uses each row once, in the number of parts that the recipe sets."""
    count = subject.schedule.minibatches
    epochs = [parts[at : at + count] for at in range(0, len(parts), count)]
    once = all(sorted(row for part in epoch for row in part) == list(range(rows)) for epoch in epochs)
    if once and len(epochs) == subject.schedule.epochs and len(parts) > 1 and all(parts):
        return ""
    return f"the updates were made from rows {parts}"


def _parts(flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


# ── masks and shapes ─────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES: Mapping[str, tuple[str, ...]] = {
    "a fully masked row": ("0011", "0000", "01101", "0001"),
    "rows of one action": ("01", "01", "0001", "01"),
    "equal lengths": ("0011", "0011", "0011", "0011"),
    "one row": ("00101",),
}
NOBODY_ACTED = ("000", "0")


def shapes(subject: Subject) -> str:
    """Masked rows, single actions, equal lengths and empty batches work."""
    bench = Bench.of(subject)
    found = [_as_plain(bench, bench.rows(shaped(patterns, seed=7)), name) for name, patterns in SHAPES.items()]
    nothing = bench.batch(bench.rows(shaped(NOBODY_ACTED, seed=7)))
    empty = bench.batch(bench.rows(shaped(("01",), seed=7))).select([])
    for what, given in (("rows without actions", nothing), ("an empty batch", empty)):
        gradient = bench.gradient(bench.prepared(given))
        found.append("" if float(gradient.abs().max()) == 0 else f"{what}: the gradient is not zero")
    return _first(*found)


def masks(subject: Subject) -> str:
    """The gradient at the student's outputs of prompt, tool and last positions is exactly zero."""
    bench = Bench.of(subject)
    rows = bench.rows(ragged(1))
    given = bench.prepared(bench.batch(rows))
    toy = bench.learner
    toy.watched = []
    try:
        bench.gradient(given, replace(LIMITS, micro_batch_tokens=10**6))
        ((packed, hidden),) = toy.watched
    finally:
        toy.watched = None
    assert hidden.grad is not None
    acted = torch.zeros(len(hidden), dtype=torch.bool)
    for places, mask in zip(packed.rows, rows.masks, strict=True):
        acted[places[mask.nonzero().squeeze(-1) - 1]] = True
    moved = hidden.grad.abs().sum(-1)
    if bool((moved[~acted] != 0).any()):
        return f"{int((moved[~acted] != 0).sum())} positions that chose no action have a gradient"
    return "" if bool((moved[acted] != 0).any()) else "no action has a gradient"


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def finite_differences(subject: Subject) -> str:
    """The gradient agrees with finite differences of the loss in random directions."""
    bench = Bench.of(subject)
    generator = torch.Generator().manual_seed(3)
    for seed in range(DRAWS):
        prepared = bench.prepared(bench.batch(bench.rows(ragged(seed))))
        gradient = bench.gradient(prepared)
        direction = torch.randn(len(gradient), generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        ahead, behind = (_moved(bench, prepared, direction, by) for by in (STEP, -STEP))
        slope, expected = (ahead - behind) / (2 * STEP), float(gradient @ direction)
        if abs(slope - expected) > 1e-5 * float(gradient.norm()):
            return f"rows {seed}: the loss has slope {slope:.8g}, the gradient says {expected:.8g}"
    return ""


def _moved(bench: Bench, prepared: Batch, direction: Tensor, by: float) -> float:
    parameters = bench.learner.parameters()
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter, part in zip(parameters, _parts(direction, parameters), strict=True):
        parameter.data.add_(by * part)
    value = bench.value(prepared)
    for parameter, was in zip(parameters, kept, strict=True):
        parameter.data.copy_(was)
    return value


def agreement(subject: Subject) -> str:
    """A teacher or reference equal to the student, or equal rewards, give zero loss and gradient. A teacher almost
    equal to the student gives almost zero loss."""
    cast = Cast()
    rows = ragged(2)
    rows = constrain(rows) if subject.constrained else rows
    rows = replace(rows, gap=torch.zeros_like(rows.gap))
    if subject.agrees in ("rewards", "reference"):
        rows = replace(rows, rewards=torch.full_like(rows.rewards, 0.5))
    if subject.agrees in ("teacher", "reference"):
        twin = cast.teacher if subject.agrees == "teacher" else cast.reference
        _become(twin, cast.student)
    bench = Bench.of(subject, cast)
    prepared = bench.prepared(bench.batch(rows))
    gradient, value = float(bench.gradient(prepared).norm()), bench.value(prepared)
    if gradient > 1e-12 or abs(value) > 1e-12:
        return f"nothing is left to learn, but the loss is {value:.2g} and the gradient's norm {gradient:.2g}"
    for toy in (cast.teacher, cast.reference):
        toy.head.linear.bias.data[0] += NEARLY
    value = 0.0 if subject.agrees == "rewards" else bench.value(bench.prepared(bench.batch(rows)))
    return f"almost nothing is left to learn, but the loss is {value:.2g}" if abs(value) > 100 * NEARLY else ""


def _become(twin: Toy, student: Toy) -> None:
    """Copy the student into `twin`, such that its distribution at temperature 1 is that of the student at its own."""
    for own, theirs in zip(twin.parameters(), student.parameters(), strict=True):
        own.data.copy_(theirs)
    twin.head.linear.weight.data.div_(TEMPERATURE)
    twin.head.linear.bias.data.div_(TEMPERATURE)


EXTREMES: Mapping[str, tuple[float, float]] = {
    "student logits of 1e4": (1e4, 0.0),
    "student logits of -1e4": (-1e4, 0.0),
    "a token that the teacher excludes": (0.0, -torch.inf),
    "teacher logits of 1e4": (0.0, 1e4),
    "both at odds": (1e4, -torch.inf),
}
"""What is added to the logits of one token: to those of the student, and to those of teacher and reference."""


def extremes(subject: Subject) -> str:
    """Losses and gradients are finite in float64 and float32, and not zero if the teacher excludes a token."""
    for dtype in (torch.float64, torch.float32):
        for what, (own, theirs) in EXTREMES.items():
            try:
                gradient = _extreme(subject, own, theirs, dtype)
            except update.NonFiniteLoss as error:
                return f"{what}, {dtype}: {error}"
            if not bool(torch.isfinite(gradient).all()):
                return f"{what}, {dtype}: the gradient is not finite"
            if subject.exact and theirs == -torch.inf and own == 0 and not bool((gradient != 0).any()):
                return f"{what}, {dtype}: no gradient is left"
    return ""


def _extreme(subject: Subject, own: float, theirs: float, dtype: torch.dtype) -> Tensor:
    cast = Cast()
    token = RARE if own < 0 else 1
    cast.student.head.linear.bias.data[token] += own
    for toy in (cast.teacher, cast.reference):
        toy.head.linear.bias.data[token] += theirs
    bench = Bench.of(subject, cast.to(dtype))
    return bench.gradient(bench.prepared(bench.batch(bench.rows(ragged(5, groups=2)))))


CHECKS: Mapping[str, Check] = {
    "plain": plain,
    "splits": splits,
    "updates": updates,
    "layouts": layouts,
    "shapes": shapes,
    "masks": masks,
    "finite_differences": finite_differences,
    "agreement": agreement,
    "extremes": extremes,
}
"""The remaining checks are `target`, the comparison with the exact gradient, and `processes`, which uses two ranks."""


def applies(name: str, subject: Subject) -> bool:
    """Whether a check applies to a subject."""
    if name == "agreement":
        return subject.agrees is not None
    if name == "updates":
        return subject.each is not None
    return subject.smooth if name == "finite_differences" else True
