"""The contract of algorithms: the columns they need, the payload they ask of teachers, their losses, and up to two
pure functions that compute advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from tutelage.config.objectives import PayloadName
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.losses.contract import Loss

Derived = Literal["old_logp", "values"]


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """The output head of a teacher: hidden states [actions, width] → float32 log-probs [actions, shared vocabulary]."""

    name: str
    log_probs: Callable[[Tensor], Tensor]
    width: int | None = None
    """width of its hidden states, which are padded to that of the widest teacher; None if they are not padded"""
    measured: Callable[[Tensor], Tensor] | None = None
    """replaces `log_probs` in evaluation, for a teacher whose temperature matches the student's"""

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.log_probs(hidden[..., : self.width])

    def neutral(self) -> TeacherHead:
        """Return the head for evaluation, where the student's temperature is 1."""
        return self if self.measured is None else TeacherHead(self.name, self.measured, self.width)


@dataclass(frozen=True, slots=True)
class Episodes:
    """How rows form episodes and groups: rows of an episode share a reward, episodes of a group share a prompt."""

    of_row: Tensor
    """int64 [rows]: number of the row's episode"""
    group: Tensor
    """int64 [episodes]: number of the episode's group"""
    reward_row: Tensor
    """int64 [episodes]: the last row of each episode, from which its reward is read. All rows of an episode hold the
    same reward: which trajectory it comes from (`reward_from`) is decided before rows are stored."""

    @classmethod
    def of(cls, batch: Batch) -> Episodes:
        """Build from the keys of a batch, which are in key order."""
        numbers: dict[object, int] = {}
        groups: dict[object, int] = {}
        last: dict[int, int] = {}
        of_row, group = [], []
        for row, key in enumerate(batch.keys):
            if key.episode not in numbers:
                numbers[key.episode] = len(numbers)
                group.append(groups.setdefault(key.group, len(groups)))
            of_row.append(numbers[key.episode])
            last[numbers[key.episode]] = row
        return cls(
            torch.tensor(of_row, dtype=torch.int64),
            torch.tensor(group, dtype=torch.int64),
            torch.tensor([last[number] for number in range(len(last))], dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class Signal:
    """Columns that an algorithm adds to a batch before the update."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """row-span columns [rows]"""
    columns: Mapping[str, Ragged] = field(default_factory=dict)
    """action-span columns"""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def added_to(self, batch: Batch) -> Batch:
        """Return the batch with these columns added."""
        return replace(batch, columns={**batch.columns, **self.columns}, rows={**batch.rows, **self.rows})


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A training algorithm: what it needs, what it computes, and its losses."""

    name: str
    needs: tuple[str, ...]
    """columns that a row must have before its group is complete"""
    payload: PayloadName
    """what it asks of teachers"""
    losses: tuple[Loss, ...]
    note: str
    """one line for the user: what is optimised, and whether it is exact"""
    unconstrained: str = ""
    """why it cannot learn from rows that were drawn under a constraint, and what can; empty if it can"""
    top_k: int = 0
    derives: tuple[Derived, ...] = ()
    """columns that the learner computes before the update"""
    over_rows: Callable[[Mapping[str, Tensor], Episodes], Signal] | None = None
    """computes the signal from row-span columns (rewards) and groups"""
    over_columns: Callable[[Batch], Signal] | None = None
    """computes the signal from per-action columns"""
    aggregate: Callable[[Tensor], Mapping[str, Ragged]] | None = None
    """number of actions of each row of an update → the column `weight`; None if the loss is a mean over actions"""
    shares: tuple[str, ...] = ()
    """group-span columns that the model needs; those that the rows lack are skipped"""
    reads: tuple[Loss, ...] = ()
    """losses that give further columns, named after them, which the learner computes before the update"""
    at_first: Callable[[Batch, Mapping[str, Ragged]], Mapping[str, float]] | None = None
    """computes metrics from the columns of a step's first update, when the weights are still those of the sampler"""
    critic_losses: tuple[Loss, ...] = ()
    """losses of the critic on the same batch; empty if there is no critic"""
