"""From a batch to new weights: the signal (old log-probs, values, advantages), then one update or several.

What no loss needs is not computed: supervised distillation goes straight to its one update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from understudy.algorithms.contract import Algorithm, Episodes, Signal
from understudy.algorithms.policy import ReadLogp
from understudy.algorithms.ppo import ReadValues
from understudy.data.ragged import Ragged
from understudy.data.trajectory import Batch, GroupKey
from understudy.learner.update import Limits, measure
from understudy.losses.contract import Loss
from understudy.models.causal_lm import CausalLM
from understudy.queue.contract import BatchRef, SampleQueue


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model that learns: the student, or its critic."""

    model: CausalLM
    optimizer: torch.optim.Optimizer
    named: tuple[tuple[str, torch.nn.Parameter], ...]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.named]

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often a batch is learned from, and in which parts."""

    epochs: int = 1
    minibatches: int = 1
    seed: int = 0
    """of the order in which episodes are spread over the parts"""
    actor: bool = True
    """False: only the critic learns"""


def prepare(
    algorithm: Algorithm, student: Trainable, critic: Trainable | None, batch: Batch, limits: Limits
) -> tuple[Batch, dict[str, float]]:
    """Add what the losses need and rollout could not give; it is held fixed during the updates."""
    signals: list[Signal] = []
    if "old_logp" in algorithm.derives:
        signals.append(_read(student, batch, ReadLogp(), limits))
    if "values" in algorithm.derives:
        assert critic is not None
        signals.append(_read(critic, batch, ReadValues(), limits))
    if algorithm.over_rows is not None:
        signals.append(algorithm.over_rows(batch.rows, Episodes.of(batch)))
    metrics: dict[str, float] = {}
    for signal in signals:
        batch = signal.added_to(batch)
        metrics |= signal.metrics
    if algorithm.over_columns is not None and batch.columns["behaviour_logp"].values.numel():
        signal = algorithm.over_columns(batch)
        batch, metrics = signal.added_to(batch), {**metrics, **signal.metrics}
    return batch, metrics


def _read(who: Trainable, batch: Batch, reader: Loss, limits: Limits) -> Signal:
    """The column that the reader is named after, and none of those that are measured beside it."""
    found = measure(who.model, batch, [reader], limits)
    return Signal(columns={name: column for name, column in found.items() if name == reader.name})


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step: who learns what from which rows."""

    trainable: Trainable
    losses: Sequence[Loss]
    batch: Batch
    rows: list[int]
    """their numbers in the whole batch"""
    prefix: str = ""
    """of its metrics' names"""
    recorded: bool = False
    """its per-action columns go into the record"""


def updates(
    algorithm: Algorithm, student: Trainable, critic: Trainable | None, batch: Batch, schedule: Schedule
) -> Iterator[Update]:
    """All updates of one step, the critic's first."""
    learners = [] if critic is None else [(critic, algorithm.critic_losses, "critic_")]
    if schedule.actor:
        learners.append((student, algorithm.losses, ""))
    for trainable, losses, prefix in learners:
        for epoch in range(schedule.epochs):
            for rows in minibatches(batch, schedule, epoch):
                part = batch if len(rows) == len(batch) else batch.select(rows)
                if algorithm.aggregate is not None:
                    part = Signal(columns=algorithm.aggregate(part.columns["behaviour_logp"].lengths)).added_to(part)
                yield Update(trainable, losses, part, rows, prefix, recorded=trainable is student and epoch == 0)


@dataclass(slots=True)
class Learned:
    """What the updates of a step reported."""

    metrics: dict[str, float] = field(default_factory=dict)
    """of the whole step"""
    found: list[dict[str, float]] = field(default_factory=list)
    parts: list[tuple[list[int], dict[str, Ragged]]] = field(default_factory=list)

    def add(self, work: Update, metrics: Mapping[str, float], columns: dict[str, Ragged]) -> None:
        named = {name if name.startswith("value") else f"{work.prefix}{name}": value for name, value in metrics.items()}
        self.found.append(named)
        if work.recorded:
            self.parts.append((work.rows, columns))

    def summary(self) -> tuple[dict[str, float], dict[str, Ragged]]:
        """Metrics of the step, and the per-action columns in the order of its batch."""
        return {**self.metrics, **summary(self.found)}, _in_order(self.parts) if self.parts else {}


def minibatches(batch: Batch, schedule: Schedule, epoch: int) -> list[list[int]]:
    """Row numbers of each update: episodes stay whole, and are dealt out in an order drawn anew for every epoch."""
    if schedule.minibatches == 1:
        return [list(range(len(batch)))]
    of_row = Episodes.of(batch).of_row.tolist()
    episodes = max(of_row, default=-1) + 1
    generator = torch.Generator().manual_seed(schedule.seed * 1009 + epoch)
    order = torch.randperm(episodes, generator=generator).tolist()
    parts: list[list[int]] = []
    for number in range(schedule.minibatches):
        members = set(order[number :: schedule.minibatches])
        parts.append([row for row, episode in enumerate(of_row) if episode in members])
    return [part for part in parts if part]


def summary(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several updates as one: means, and the extremes of extremes."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in found for name in metrics):
        values = [metrics[name] for metrics in found if name in metrics]
        if name.endswith("_min"):
            result[name] = min(values)
        else:
            result[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return result


def _in_order(parts: Sequence[tuple[list[int], dict[str, Ragged]]]) -> dict[str, Ragged]:
    """Columns of mini-batches put back into the order of the batch."""
    if len(parts) == 1:
        return parts[0][1]
    present = [part for part in parts if part[1]]
    if not present:
        return {}
    result: dict[str, Ragged] = {}
    for name, like in present[0][1].items():
        rows: dict[int, Tensor] = {}
        for numbers, columns in present:
            rows |= dict(zip(numbers, columns[name].rows(), strict=True))
        empty = like.values[:0]
        ordered = [rows.get(number, empty) for number in range(sum(len(numbers) for numbers, _ in parts))]
        result[name] = Ragged.from_rows(ordered, dtype=like.values.dtype, trailing=like.trailing)
    return result


async def flat_groups(queue: SampleQueue, ref: BatchRef) -> list[GroupKey]:
    """Groups whose episodes all have the same reward, that of their last trajectories: they teach nothing."""
    batch = await queue.get(ref, ("reward",))
    last = dict(zip((key.episode for key in batch.keys), batch.rows["reward"].tolist(), strict=True))
    rewards: dict[GroupKey, set[float]] = {}
    for episode, reward in last.items():
        rewards.setdefault(episode.group, set()).add(reward)
    return [group for group, seen in rewards.items() if len(seen) == 1]
