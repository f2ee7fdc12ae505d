"""The code that trains, run on toys: prepare, aggregate, accumulate. What comes out is a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutelage.algorithms.contract import Algorithm
from tutelage.certify.scene import PROMPTS, Rows, View, batch, everything, heads, view
from tutelage.certify.subjects import Subject
from tutelage.certify.textbook import Scalar, drawn
from tutelage.certify.toy import TEMPERATURE, VOCABULARY, Cast, Copies, Toy, earlier
from tutelage.data.ragged import concatenate
from tutelage.data.trajectory import Batch, Key
from tutelage.learner import step as learning
from tutelage.learner import update
from tutelage.learner.schedule import Schedule
from tutelage.learner.step import Trainable
from tutelage.learner.text import Limits
from tutelage.losses.contract import Loss, LossSum, ModelOut

LIMITS = Limits(micro_batch_tokens=24, logit_tokens=5, temperature=TEMPERATURE, vocabulary=VOCABULARY)


@dataclass(frozen=True, slots=True)
class Bench:
    """A subject and its cast, ready to be run."""

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
        """Who learns."""
        return self.cast.critic if self.subject.critic else self.cast.student

    @property
    def losses(self) -> tuple[Loss, ...]:
        return self.algorithm.critic_losses if self.subject.critic else self.algorithm.losses

    def batch(self, rows: Rows) -> Batch:
        """As the queue hands it over."""
        with torch.no_grad():
            return batch(rows, view(self.cast, rows), self.algorithm.needs)

    def prepared(self, given: Batch, limits: Limits = LIMITS) -> Batch:
        """What the learner gets to see: all that the losses need, held fixed from here on. As a run makes it."""
        student = trainable(self.cast.old)
        critic = trainable(self.cast.critic) if self.algorithm.critic_losses else None
        found, _ = learning.prepare(self.algorithm, student, critic, given, limits)
        works = learning.updates(self.algorithm, student, critic, found, Schedule(actor=not self.subject.critic))
        return list(works)[-1].batch

    def gradient(self, prepared: Batch, limits: Limits = LIMITS) -> Tensor:
        """What the learner adds to the weights' gradients, flat."""
        for parameter in self.learner.parameters():
            parameter.grad = None
        update.accumulate(self.learner, prepared, self.losses, limits)
        return torch.cat([_slope(parameter) for parameter in self.learner.parameters()])

    def value(self, prepared: Batch, limits: Limits = LIMITS) -> float:
        """The loss whose gradient that is."""
        sums = [_Summed(loss) for loss in self.losses]
        update.measure(self.learner, prepared, sums, limits)
        return sum(s.total * s.coefficient for s in sums) / max(1, int(prepared.columns["mask"].values.sum()))

    def textbook(self, scalar: Scalar, seen: View) -> Tensor:
        """The gradient of something plain, flat."""
        found = torch.autograd.grad(scalar(seen), self.learner.parameters(), retain_graph=True, allow_unused=True)
        pairs = zip(found, self.learner.parameters(), strict=True)
        return torch.cat([(torch.zeros_like(own) if slope is None else slope).flatten() for slope, own in pairs])


class _Summed:
    """Adds up what a loss returns, chunk after chunk."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.name, self.coefficient, self.total = loss, loss.name, loss.coefficient, 0.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        result = self.loss(out, columns)
        self.total += float(result.total)
        return result


def _slope(parameter: torch.nn.Parameter) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()).flatten()


def trainable(toy: Toy) -> Trainable:
    """With plain gradient descent."""
    return Trainable(toy, torch.optim.SGD(toy.parameters(), lr=1.0), toy.named_parameters())


# ── expectations ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class World:
    """Everything that could be written after one prompt."""

    rows: Rows
    seen: View


@dataclass(frozen=True, slots=True)
class Expected:
    """The mean gradient, and the root of the mean square of its norm: what zero is measured by."""

    mean: Tensor
    size: float


def worlds(bench: Bench) -> list[World]:
    """One for each prompt; only the smallest where pairs are enumerated."""
    chosen = PROMPTS if bench.subject.samples == 1 else PROMPTS[-1:]
    rows = [everything(prompt, layout) for prompt, layout in chosen]
    return [World(own, view(bench.cast, own)) for own in rows]


def expectation(bench: Bench, found: list[World]) -> Expected:
    """Σ probability × gradient over all batches that could be drawn; prompts are equally likely."""
    total = torch.zeros(sum(p.numel() for p in bench.learner.parameters()), dtype=torch.float64)
    square = 0.0
    for world in found:
        likely, gradients = _drawn(bench, world)
        total += likely @ gradients / len(found)
        square += float(likely @ gradients.square().sum(-1)) / len(found)
    return Expected(total, square**0.5)


def _drawn(bench: Bench, world: World) -> tuple[Tensor, Tensor]:
    """How likely each batch is [draws], and its gradient [draws, parameters].

    A batch of one row is prepared together with all others, as rows do not look at each other then; a group is prepared
    by itself. The learner's pass is over all of them at once, with a copy of the weights for each row: what it adds to
    a copy is that row's share of the mean, so times the number of batches it is the share within its own.
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
"""two episodes of one group"""


def _joined(parts: list[Batch]) -> Batch:
    return Batch(
        tuple(key for part in parts for key in part.keys),
        {name: concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        {name: torch.cat([part.rows[name] for part in parts]) for name in parts[0].rows},
    )


def aim(bench: Bench, found: list[World], scalar: Scalar) -> Tensor:
    """The gradient of a target, over the same prompts."""
    return torch.stack([bench.textbook(scalar, world.seen) for world in found]).mean(0)
