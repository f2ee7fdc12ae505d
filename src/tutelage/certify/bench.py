"""Run the training code (prepare, aggregate, accumulate) on toy models to obtain gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutelage.algorithms.contract import Algorithm
from tutelage.certify.drawing import as_drawn
from tutelage.certify.scene import LONGER, PROMPTS, Rows, View, batch, constrain, everything, heads, view
from tutelage.certify.subjects import Subject
from tutelage.certify.textbook import Scalar, drawn
from tutelage.certify.toy import TEMPERATURE, VOCABULARY, Cast, Copies, Toy, ToyMasks, earlier
from tutelage.data.ragged import concatenate
from tutelage.data.trajectory import Batch, Key
from tutelage.learner import step as learning
from tutelage.learner import update
from tutelage.learner.schedule import Schedule
from tutelage.learner.step import Trainable
from tutelage.learner.text import Limits
from tutelage.losses.contract import Loss, LossSum, ModelOut

LIMITS = Limits(micro_batch_tokens=24, logit_tokens=5, temperature=TEMPERATURE, vocabulary=VOCABULARY, masks=ToyMasks())


@dataclass(frozen=True, slots=True)
class Bench:
    """A subject with its toy models."""

    subject: Subject
    cast: Cast
    algorithm: Algorithm

    @classmethod
    def of(cls, subject: Subject, cast: Cast | None = None) -> Bench:
        cast = cast if cast is not None else Cast()
        dtype = cast.student.embedding.dtype
        if subject.updated and cast.before is None:
            cast = replace(cast, before=earlier(5, 0.1).to(dtype))
        if subject.sampled_apart and cast.sampler is None:
            cast = replace(cast, sampler=earlier(6, 0.1).to(dtype))
        return cls(subject, cast, subject.build(heads(cast)))

    @property
    def learner(self) -> Toy:
        """The trained model: the student or the critic."""
        return self.cast.critic if self.subject.critic else self.cast.student

    @property
    def losses(self) -> tuple[Loss, ...]:
        return self.algorithm.critic_losses if self.subject.critic else self.algorithm.losses

    def rows(self, rows: Rows) -> Rows:
        """Return rows that follow constraints if those of the subject do."""
        return constrain(rows) if self.subject.constrained else rows

    @torch.no_grad()
    def batch(self, rows: Rows) -> Batch:
        """Return the batch as the queue returns it."""
        if not rows.spans:
            return batch(rows, view(self.cast, rows), self.algorithm.needs)
        drawn_rows, behaviour = as_drawn(self.cast.drew, rows)
        return batch(drawn_rows, replace(view(self.cast, drawn_rows), behaviour=behaviour), self.algorithm.needs)

    def prepared(self, given: Batch, limits: Limits = LIMITS) -> Batch:
        """Return the batch with all columns that the losses need, prepared as in a run."""
        student = trainable(self.cast.old)
        critic = trainable(self.cast.critic) if self.algorithm.critic_losses else None
        found, _ = learning.prepare(self.algorithm, student, critic, given, limits)
        works = learning.updates(self.algorithm, student, critic, found, Schedule(actor=not self.subject.critic))
        return list(works)[-1].batch

    def gradient(self, prepared: Batch, limits: Limits = LIMITS) -> Tensor:
        """Return the gradient that the learner accumulates, flattened."""
        for parameter in self.learner.parameters():
            parameter.grad = None
        update.accumulate(self.learner, prepared, self.losses, limits)
        return torch.cat([_slope(parameter) for parameter in self.learner.parameters()])

    def value(self, prepared: Batch, limits: Limits = LIMITS) -> float:
        """Return the loss of that gradient."""
        sums = [_Summed(loss) for loss in self.losses]
        update.measure(self.learner, prepared, sums, limits)
        return sum(s.total * s.coefficient for s in sums) / max(1, int(prepared.columns["mask"].values.sum()))

    def textbook(self, scalar: Scalar, seen: View) -> Tensor:
        """Return the gradient of a textbook formula, flattened."""
        found = torch.autograd.grad(scalar(seen), self.learner.parameters(), retain_graph=True, allow_unused=True)
        pairs = zip(found, self.learner.parameters(), strict=True)
        return torch.cat([(torch.zeros_like(own) if slope is None else slope).flatten() for slope, own in pairs])


class _Summed:
    """Sums the values of a loss over chunks."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.name, self.coefficient, self.total = loss, loss.name, loss.coefficient, 0.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        result = self.loss(out, columns)
        self.total += float(result.total)
        return result


def _slope(parameter: torch.nn.Parameter) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()).flatten()


def trainable(toy: Toy) -> Trainable:
    """Return a trainable with plain gradient descent."""
    return Trainable(toy, torch.optim.SGD(toy.parameters(), lr=1.0), toy.named_parameters())


# ── expectations ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class World:
    """All sequences that can follow one prompt."""

    rows: Rows
    seen: View


@dataclass(frozen=True, slots=True)
class Expected:
    """The mean gradient, and the root mean square of the gradient norm as the scale for comparisons with zero."""

    mean: Tensor
    size: float


def worlds(bench: Bench) -> list[World]:
    """Return one world per prompt, or only the smallest if pairs are enumerated."""
    chosen = LONGER if bench.subject.constrained else PROMPTS
    chosen = chosen if bench.subject.samples == 1 else chosen[-1:]
    rows = [everything(prompt, layout, constrained=bench.subject.constrained) for prompt, layout in chosen]
    return [World(own, view(bench.cast, own)) for own in rows]


def expectation(bench: Bench, found: list[World]) -> Expected:
    """Return the expected gradient over all possible batches; prompts are equally likely."""
    total = torch.zeros(sum(p.numel() for p in bench.learner.parameters()), dtype=torch.float64)
    square = 0.0
    for world in found:
        likely, gradients = _drawn(bench, world)
        total += likely @ gradients / len(found)
        square += float(likely @ gradients.square().sum(-1)) / len(found)
    return Expected(total, square**0.5)


def _drawn(bench: Bench, world: World) -> tuple[Tensor, Tensor]:
    """Return the probability [draws] and the gradient [draws, parameters] of each batch.

    Batches of one row are prepared together, because their rows are independent; each group is prepared separately. The
    learner then processes all batches in one pass, with a copy of the weights for each row. The gradient of a copy is
    the row's share of the mean over all batches, so multiplying by the number of batches gives its share in its own
    batch.
    """
    likely, complete = drawn(world.seen), bench.batch(world.rows)
    prepared = bench.prepared(complete)
    if bench.subject.samples == 2:
        pairs = [(first, second) for first in range(len(complete)) for second in range(first + 1)]
        prepared = _joined([bench.prepared(replace(complete.select(list(pair)), keys=PAIR)) for pair in pairs])
        one, two = torch.tensor(pairs).T
        likely = likely[one] * likely[two] * torch.where(one == two, 1, 2)
    copies = Copies(bench.learner, len(prepared))
    update.accumulate(copies, prepared, bench.losses, replace(LIMITS, micro_batch_tokens=10**9, logit_tokens=256))
    gradients = copies.gradients().view(len(likely), bench.subject.samples, -1).sum(1)
    return likely, gradients * len(likely)


PAIR = (Key("train", 0, 0, 0, 0), Key("train", 0, 1, 0, 0))
"""The keys of two episodes of one group."""


def _joined(parts: list[Batch]) -> Batch:
    return Batch(
        tuple(key for part in parts for key in part.keys),
        {name: concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        {name: torch.cat([part.rows[name] for part in parts]) for name in parts[0].rows},
        {name: [value for part in parts for value in part.objects[name]] for name in parts[0].objects},
    )


def aim(bench: Bench, found: list[World], scalar: Scalar) -> Tensor:
    """Return the gradient of a target over the same prompts."""
    return torch.stack([bench.textbook(scalar, world.seen) for world in found]).mean(0)
