"""One training step: compute the signal (old log-probs, values, advantages), then run one or more updates.

Nothing is computed that no loss needs: supervised distillation starts with its update.

Several ranks share a batch: each fetches its own rows and computes on them. Advantages depend on several rows, so their
inputs (one number per action or row, never a distribution) are exchanged between ranks first. Every rank then computes
the same signal as a single process would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms.contract import Algorithm, Episodes, Signal
from tutelage.algorithms.policy import ReadLogp
from tutelage.algorithms.ppo import ReadValues
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, GroupKey, Key
from tutelage.errors import UserError
from tutelage.learner.masters import Rounded, round_weights
from tutelage.learner.packing import deal, in_order
from tutelage.learner.ranks import Ranks, alone
from tutelage.learner.reference import ReferenceCheck
from tutelage.learner.schedule import Schedule
from tutelage.learner.update import Cut, measure, update
from tutelage.losses.contract import Loss
from tutelage.queue.constrained import CONSTRAINED, with_constraints
from tutelage.queue.contract import BatchRef, SampleQueue


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model that is trained: the student or the critic."""

    model: Any
    """CausalLM or FlowModel, as the learner's `Cut` expects"""
    optimizer: torch.optim.Optimizer
    named: tuple[tuple[str, torch.nn.Parameter], ...]
    """parameters that the optimizer updates: float32 masters, or the model's own weights if it computes in float32"""
    average: dict[str, Tensor] = field(default_factory=dict)
    """running mean of the weights, by name; empty if it is off"""
    decay: float = 0.0
    """decay of the running mean"""
    rounded: tuple[Rounded, ...] = ()
    """weights that compute in a narrower dtype, with their masters"""

    @property
    def weights(self) -> tuple[tuple[str, torch.nn.Parameter], ...]:
        """The weights that the model computes with, by name."""
        narrow = {id(master): weight for master, weight in self.rounded}
        return tuple((name, narrow.get(id(master), master)) for name, master in self.named)

    def round_weights(self) -> None:
        """Copy the masters into the model. Call this whenever the masters have changed."""
        round_weights(self.rounded)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.named]

    @torch.no_grad()
    def follow(self) -> None:
        """Update the running mean with the current weights."""
        for name, parameter in self.named if self.average else ():
            self.average[name].lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their running mean; a second call restores them."""
        if not self.average:
            return
        for name, parameter in self.named:
            kept = parameter.clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)
        self.round_weights()

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a batch that one rank holds, and the keys and action counts of all rows."""

    keys: tuple[Key, ...]
    """keys of the whole batch"""
    actions: Tensor
    """int64 [rows]: number of actions of each row of the whole batch"""
    mine: list[int]
    """row numbers of this rank, in ascending order"""
    ranks: Ranks = alone

    @classmethod
    def all_of(cls, batch: Batch) -> Share:
        return cls(batch.keys, batch.columns["behaviour_logp"].lengths, list(range(len(batch))))

    @classmethod
    def dealt(cls, ref: BatchRef, ranks: Ranks) -> Share:
        """Divide the tokens evenly among ranks. Every rank computes the same division from the tags of the rows."""
        tokens, actions = ([int(ref.tags[key][tag]) for key in ref.keys] for tag in ("tokens", "actions"))
        mine = deal(tokens, ranks.count)[ranks.number]
        return cls(ref.keys, torch.tensor(actions, dtype=torch.int64), mine, ranks)

    def whole(self, batch: Batch) -> Batch:
        """Return all rows, with the columns that signals are computed from: one number per action or row."""
        if self.ranks.count == 1:
            return batch
        small = {name: c for name, c in batch.columns.items() if not c.trailing and name not in ("tokens", "mask")}
        parts = self.ranks.all((self.mine, small, dict(batch.rows)))
        order = torch.tensor([row for numbers, _, _ in parts for row in numbers], dtype=torch.int64).argsort()
        rows = {name: torch.cat([values[name] for _, _, values in parts])[order] for name in batch.rows}
        return Batch(self.keys, in_order([(numbers, columns) for numbers, columns, _ in parts]), rows)

    def own(self, signal: Signal) -> Signal:
        """Return the part of a signal over all rows that belongs to this rank."""
        if self.ranks.count == 1:
            return signal
        rows = {name: values[torch.tensor(self.mine, dtype=torch.int64)] for name, values in signal.rows.items()}
        return Signal(rows, {name: column.select(self.mine) for name, column in signal.columns.items()}, signal.metrics)


def prepare(
    algorithm: Algorithm,
    student: Trainable,
    critic: Trainable | None,
    batch: Batch,
    cut: Cut,
    share: Share | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Add the columns that the losses need and rollout does not provide. They stay fixed during the updates."""
    share = share or Share.all_of(batch)
    if "old_logp" in algorithm.derives:
        batch = _read(student, batch, ReadLogp(), cut, share.ranks).added_to(batch)
    if "values" in algorithm.derives:
        assert critic is not None
        batch = _read(critic, batch, ReadValues(), cut, share.ranks).added_to(batch)
    for reader in algorithm.reads:
        batch = _read(student, batch, reader, cut, share.ranks).added_to(batch)
    metrics: dict[str, float] = {}
    if algorithm.over_rows is None and algorithm.over_columns is None:
        return batch, metrics
    whole = share.whole(batch)
    if algorithm.over_rows is not None:
        signal = algorithm.over_rows(whole.rows, Episodes.of(whole))
        whole, batch = signal.added_to(whole), share.own(signal).added_to(batch)
        metrics |= signal.metrics
    if algorithm.over_columns is not None and whole.columns["behaviour_logp"].values.numel():
        signal = algorithm.over_columns(whole)
        batch = share.own(signal).added_to(batch)
        metrics |= signal.metrics
    return batch, metrics


def _read(trainable: Trainable, batch: Batch, reader: Loss, cut: Cut, ranks: Ranks) -> Signal:
    """Return the column named after the reader, without the other columns that the pass reports."""
    found = measure(trainable.model, batch, [reader], cut, ranks)
    return Signal(columns={name: column for name, column in found.items() if name == reader.name})


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step: a model, its losses and its rows."""

    trainable: Trainable
    losses: Sequence[Loss]
    batch: Batch
    rows: list[int]
    """row numbers within this rank's rows"""
    prefix: str = ""
    """prefix of its metric names"""
    recorded: bool = False
    """whether its per-action columns are recorded"""


def updates(
    algorithm: Algorithm,
    student: Trainable,
    critic: Trainable | None,
    batch: Batch,
    schedule: Schedule,
    share: Share | None = None,
) -> Iterator[Update]:
    """Yield all updates of a step, those of the critic first. Mini-batches are drawn from the rows of all ranks."""
    share = share or Share.all_of(batch)
    whole = Batch(share.keys, {}, {})
    here = {row: number for number, row in enumerate(share.mine)}
    learners = [] if critic is None else [(critic, algorithm.critic_losses, "critic_")]
    if schedule.actor:
        learners.append((student, algorithm.losses, ""))
    for trainable, losses, prefix in learners:
        for epoch in range(schedule.epochs):
            for rows in minibatches(whole, schedule, epoch):
                places = [place for place, row in enumerate(rows) if row in here]
                mine = [here[rows[place]] for place in places]
                part = batch if len(mine) == len(batch) else batch.select(mine)
                if algorithm.aggregate is not None:
                    weights = algorithm.aggregate(share.actions[torch.tensor(rows, dtype=torch.int64)])
                    if len(places) < len(rows):
                        weights = {name: column.select(places) for name, column in weights.items()}
                    part = Signal(columns=weights).added_to(part)
                yield Update(trainable, losses, part, mine, prefix, recorded=trainable is student and epoch == 0)


@dataclass(slots=True)
class Learned:
    """The metrics and columns of a step's updates."""

    metrics: dict[str, float] = field(default_factory=dict)
    """metrics of the whole step"""
    found: list[dict[str, float]] = field(default_factory=list)
    parts: list[tuple[list[int], dict[str, Ragged]]] = field(default_factory=list)

    def add(self, work: Update, metrics: Mapping[str, float], columns: dict[str, Ragged]) -> None:
        named = {name if name.startswith("value") else f"{work.prefix}{name}": value for name, value in metrics.items()}
        self.found.append(named)
        if work.recorded:
            self.parts.append((work.rows, columns))

    def summary(self) -> tuple[dict[str, float], dict[str, Ragged]]:
        """Return the metrics of the step, and the per-action columns in the order of its batch."""
        return {**self.metrics, **summary(self.found)}, in_order(self.parts) if self.parts else {}


def minibatches(batch: Batch, schedule: Schedule, epoch: int) -> list[list[int]]:
    """Return the row numbers of each mini-batch. Episodes stay whole and are shuffled for every epoch."""
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
    """Combine the metrics of several updates: means, or the extreme of minima and maxima."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in found for name in metrics):
        values = [metrics[name] for metrics in found if name in metrics]
        if name.endswith("_min"):
            result[name] = min(values)
        else:
            result[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return result


async def flat_groups(queue: SampleQueue, ref: BatchRef) -> list[GroupKey]:
    """Return the groups whose episodes all have the same reward, so that all advantages are 0."""
    batch = await queue.get(ref, ("reward",))
    rewards: dict[GroupKey, set[float]] = {}
    for row in Episodes.of(batch).reward_row.tolist():
        rewards.setdefault(batch.keys[row].group, set()).add(float(batch.rows["reward"][row]))
    return [group for group, seen in rewards.items() if len(seen) == 1]


async def get_widened(queue: SampleQueue, ref: BatchRef, names: Sequence[str]) -> Batch:
    """Like `queue.get`, for teachers with hidden states of different widths.

    Narrower hidden states are padded with zeros, which the heads of their teachers do not read.
    """
    if "teacher_hidden" not in names or not ref.keys:
        return await queue.get(ref, names)
    batch = await queue.get(ref, [*(name for name in names if name != "teacher_hidden"), "teacher_index"])
    index = batch.rows["teacher_index"].tolist()
    parts = []
    for teacher in sorted(set(index)):
        rows = [row for row, number in enumerate(index) if number == teacher]
        parts.append((rows, (await queue.get(ref.rows(rows), ("teacher_hidden",))).columns["teacher_hidden"]))
    width = max(hidden.trailing[0] for _, hidden in parts)
    widened = [(rows, {"teacher_hidden": hidden.map(lambda values: _widened(values, width))}) for rows, hidden in parts]
    return replace(batch, columns={**batch.columns, **in_order(widened)})


def _widened(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[-1]))


@dataclass(frozen=True, slots=True)
class Learner:
    """The models that are trained, on one rank. It fetches its own rows of a batch from the queue."""

    algorithm: Algorithm
    student: Trainable
    critic: Trainable | None
    queue: SampleQueue
    cut: Cut
    clip_norm: float
    measures: Loss
    """the per-action measures of evaluation"""
    several_widths: bool = False
    """whether teachers have hidden states of different widths"""
    ranks: Ranks = alone
    dtype: torch.dtype = torch.float32
    """dtype in which the student computes; masters are float32"""
    reference: ReferenceCheck | None = None
    """compares the first batch with the model's own forward pass"""

    async def learn(
        self, ref: BatchRef, rate: float, schedule: Schedule, shown: int
    ) -> tuple[dict[str, float], dict[str, Ragged]]:
        """Run all updates of a step.

        Returns its metrics, and the per-action columns of this rank's rows among the first `shown` rows of the batch.
        Raises NonFiniteLoss on every rank if one of them finds a loss or gradient that is not finite; the weights are
        then as they were before that update.
        """
        constrained = next((key for key in ref.keys if CONSTRAINED in ref.tags[key]), None)
        if constrained is not None and self.algorithm.unconstrained:
            raise UserError(f"{constrained}: drawn under a constraint: {self.algorithm.unconstrained}")
        share = Share.dealt(ref, self.ranks)
        batch = await self._rows(ref, share)
        self.student.set_rate(rate)
        compared = self.reference(self.student.model, batch, self.ranks) if self.reference is not None else {}
        batch, signalled = prepare(self.algorithm, self.student, self.critic, batch, self.cut, share)
        learned = Learned({**signalled, **compared})
        first = self.algorithm.at_first
        for work in updates(self.algorithm, self.student, self.critic, batch, schedule, share):
            trainable = work.trainable
            metrics, columns = update(
                trainable.model,
                trainable.optimizer,
                work.batch,
                work.losses,
                self.cut,
                self.clip_norm,
                trainable.parameters,
                self.ranks,
            )
            trainable.round_weights()
            trainable.follow()
            if first is not None and columns:
                learned.metrics |= first(work.batch, columns)
                first = None
            learned.add(work, metrics, columns)
        metrics, columns = learned.summary()
        kept = [number for number, row in enumerate(share.mine) if row < shown]
        return metrics, {name: column.select(kept) for name, column in columns.items()}

    async def _get(self, ref: BatchRef, names: Sequence[str]) -> Batch:
        get = get_widened(self.queue, ref, names) if self.several_widths else self.queue.get(ref, names)
        return await with_constraints(self.queue, ref, await get)

    async def _rows(self, ref: BatchRef, share: Share) -> Batch:
        """Fetch this rank's rows and their group-span columns, which are stored with the first row of each group."""
        batch = await self._get(ref.rows(share.mine), self.algorithm.needs)
        if not self.algorithm.shares:
            return batch
        wanted, firsts = {key.group for key in batch.keys}, dict[GroupKey, int]()
        for number, key in enumerate(ref.keys):
            if key.group in wanted:
                firsts.setdefault(key.group, number)
        stored = await self.queue.get(ref.rows(list(firsts.values())), self.algorithm.shares)
        shared = {
            key.group: {name: c.row(i) for name, c in stored.columns.items()} for i, key in enumerate(stored.keys)
        }
        return replace(batch, shared=shared)

    async def measure(self, ref: BatchRef, columns: Sequence[str]) -> dict[str, Ragged]:
        """Return the per-action measures of this rank's rows, at temperature 1."""
        share = Share.dealt(ref, self.ranks)
        batch = await self._get(ref.rows(share.mine), columns)
        return measure(self.student.model, batch, [self.measures], self.cut.neutral(), self.ranks)
