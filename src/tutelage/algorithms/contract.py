"""What an algorithm is: the columns it needs, what it asks of teachers, and its losses. Two pure functions at most."""

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
    """How to expand a teacher's hidden states: [actions, width] → float32 log-probs [actions, shared vocabulary]."""

    name: str
    log_probs: Callable[[Tensor], Tensor]
    width: int | None = None
    """of its hidden states: what rows have beyond it belongs to wider teachers; None is all that they have"""
    measured: Callable[[Tensor], Tensor] | None = None
    """the same for evaluation, if that is another: of a teacher whose temperature is the student's"""

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.log_probs(hidden[..., : self.width])

    def neutral(self) -> TeacherHead:
        """For evaluation, which takes the student at temperature 1."""
        return self if self.measured is None else TeacherHead(self.name, self.measured, self.width)


@dataclass(frozen=True, slots=True)
class Episodes:
    """Which rows belong together: rows of an episode share its reward, episodes of a group share a prompt."""

    of_row: Tensor
    """int64 [rows]: number of the row's episode"""
    group: Tensor
    """int64 [episodes]: number of the episode's group"""
    reward_row: Tensor
    """int64 [episodes]: a row that has the episode's reward. All rows do: which trajectory earned it (`reward_from`) is
    settled before rows are stored. This is the last one."""

    @classmethod
    def of(cls, batch: Batch) -> Episodes:
        """From the keys of a batch, which come in key order."""
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
    """What an algorithm adds to a batch before the update."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """row-span columns [rows]"""
    columns: Mapping[str, Ragged] = field(default_factory=dict)
    """action-span columns"""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def added_to(self, batch: Batch) -> Batch:
        """The batch with these columns."""
        return replace(batch, columns={**batch.columns, **self.columns}, rows={**batch.rows, **self.rows})


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One training signal."""

    name: str
    needs: tuple[str, ...]
    """columns that a row must have before its group is complete"""
    payload: PayloadName
    """what teachers are asked for"""
    losses: tuple[Loss, ...]
    note: str
    """one line for the user: what is optimised, and whether exactly"""
    top_k: int = 0
    derives: tuple[Derived, ...] = ()
    """columns that the learner computes with the weights of before the update"""
    over_rows: Callable[[Mapping[str, Tensor], Episodes], Signal] | None = None
    """from rewards and groups: small, wherever the run is driven"""
    over_columns: Callable[[Batch], Signal] | None = None
    """from per-action columns: where the rows are"""
    aggregate: Callable[[Tensor], Mapping[str, Ragged]] | None = None
    """from the actions of each row of one update → the column `weight`, if the loss is not a mean over actions"""
    shares: tuple[str, ...] = ()
    """group-span columns that the model itself needs; those that rows have are fetched"""
    reads: tuple[Loss, ...] = ()
    """further columns, named after these, that the learner computes with the weights of before the update"""
    at_first: Callable[[Batch, Mapping[str, Ragged]], Mapping[str, float]] | None = None
    """metrics from the first update of a step, whose columns are still those of the weights that acted"""
    critic_losses: tuple[Loss, ...] = ()
    """what the critic learns from the same batch; none means that there is no critic"""
