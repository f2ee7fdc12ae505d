"""The records that cross the doors of rooms: keys, prompts, trajectories, episodes, and the columns of a row.

A *prompt* is run `samples` times; each run is an *episode*; an episode yields 1..n *trajectories*; the episodes of
one prompt are a *group*. One trajectory becomes one row of the sample queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from understudy.data.ragged import Ragged


class GroupKey(NamedTuple):
    """All episodes of one prompt."""

    partition: str
    """train or validation"""
    uid: int
    """position of the prompt in the stream that the run draws: unique within a partition"""


class EpisodeKey(NamedTuple):
    """One run of an agent loop. A later attempt supersedes an earlier one."""

    partition: str
    uid: int
    sample: int
    attempt: int = 0

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.partition, self.uid)

    def trajectory(self, index: int) -> Key:
        return Key(*self, index)


class Key(NamedTuple):
    """One trajectory: one row of the queue. Keys sort in the order in which they are drawn."""

    partition: str
    uid: int
    sample: int
    attempt: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples

    @property
    def episode(self) -> EpisodeKey:
        return EpisodeKey(*self[:4])

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.partition, self.uid)

    def __str__(self) -> str:
        return f"{self.partition}/prompt {self.uid}/sample {self.sample}/attempt {self.attempt}/trajectory {self.index}"


class Message(NamedTuple):
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file, as drawn."""

    uid: int
    """position in the stream of draws"""
    row: int
    """row number in `source`, counted from 1: what errors name"""
    source: str
    """file the row came from"""
    messages: tuple[Message, ...]
    """chat messages; a plain-string prompt is one user message"""
    text: str | None = None
    """a plain prompt to be used without a chat template (data.template: none)"""
    ground_truth: Any = None
    agent_loop: str | None = None
    """loop of this row; None means the recipe's"""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """every other column of the row, as it was in the file"""

    def __str__(self) -> str:
        return f"row {self.row} of {self.source}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence of actions by the student, as token ids.

    tokens          <system> <user> hi </> <assistant> Hello ! </>
    mask             0        0     0  0   0           1     1 1
    behaviour_logp                                    -0.2 -1.1 -0.1      (action positions only)
    """

    tokens: Tensor
    """int64 [length]: everything the student saw and wrote"""
    mask: Tensor
    """bool [length]: true where the student acted, false on prompt, tool and environment tokens"""
    behaviour_logp: Tensor
    """float32 [actions]: log-prob of each action after temperature and before truncation, as the engine computed it"""
    version: Tensor
    """int32 [actions]: weight version that produced each action"""
    finish: str = "stop"
    """why it ended: stop, length, abort"""
    context: tuple[Message, ...] | None = None
    """messages that the tokens before the first action render, where they are not the prompt's own"""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    """references to images or videos, never the media themselves"""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """further declared columns"""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first action (all of them if the student never acted)."""
        return int(self.mask.to(torch.uint8).argmax()) if bool(self.mask.any()) else len(self.tokens)

    def columns(self) -> dict[str, Tensor]:
        """The row that the queue stores."""
        row = {
            "tokens": self.tokens,
            "mask": self.mask,
            "behaviour_logp": self.behaviour_logp,
            "version": self.version,
            **self.extra,
        }
        if self.reward is not None:
            row["reward"] = torch.tensor(self.reward, dtype=torch.float32)
        return row


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished run of an agent loop."""

    key: EpisodeKey
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    reward_from: int = -1
    """index of the trajectory whose reward is the episode's"""
    timings: Mapping[str, float] = field(default_factory=dict)
    """seconds by phase: wait (until admitted), generate, tools, …; `total` is the whole"""

    def with_timings(self, timings: Mapping[str, float]) -> Episode:
        return replace(self, timings=dict(timings))


Span = Literal["sequence", "action", "step", "row"]


@dataclass(frozen=True, slots=True)
class Column:
    """What a column holds. Declared once, checked at every put."""

    name: str
    dtype: torch.dtype | None
    """None: not a tensor but any value that JSON can hold, one per trajectory"""
    span: Span
    """sequence: one value per token; action: per action; step: per denoising step; row: one per trajectory"""
    producer: str
    """the room that writes it"""
    trailing: tuple[int | None, ...] = ()
    """dims after the span's; None is any size, the same within a batch"""
    optional: bool = True
    """a row may be complete without it"""

    def __post_init__(self) -> None:
        if self.dtype is None and (self.span != "row" or self.trailing):
            raise ValueError(f"column {self.name!r} has no dtype, so it holds one value per row: span row, no trailing")


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("tokens", torch.int64, "sequence", "agent_loop", optional=False),
        Column("mask", torch.bool, "sequence", "agent_loop", optional=False),
        Column("behaviour_logp", torch.float32, "action", "agent_loop", optional=False),
        Column("version", torch.int32, "action", "agent_loop", optional=False),
        Column("reward", torch.float32, "row", "rewards"),
        Column("reward_parts", torch.float32, "row", "rewards", trailing=(None,)),
        Column("teacher_logp", torch.float32, "action", "teachers"),
        Column("teacher_topk_ids", torch.int64, "action", "teachers", trailing=(None,)),
        Column("teacher_topk_logp", torch.float32, "action", "teachers", trailing=(None,)),
        Column("student_topk_ids", torch.int64, "action", "agent_loop", trailing=(None,)),
        Column("teacher_given_logp", torch.float32, "action", "teachers", trailing=(None,)),
        Column("reference_logp", torch.float32, "action", "teachers"),
        Column("teacher_hidden", torch.float32, "action", "teachers", trailing=(None,)),
        Column("teacher_index", torch.int32, "row", "teachers"),
        Column("teacher_mass_outside", torch.float32, "row", "teachers"),
    )
}
"""Every column that a row may carry; a plugin that needs another one adds it here with `declare`."""


def declare(column: Column) -> Column:
    """Add a column to the schema."""
    known = COLUMNS.setdefault(column.name, column)
    if known != column:
        raise ValueError(f"column {column.name!r} is already declared as {known}")
    return column


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of the queue, resolved: what the learner computes on. Row i of every column belongs to keys[i]."""

    keys: tuple[Key, ...]
    columns: Mapping[str, Ragged]
    """sequence, action and step spans"""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """row-span columns: [rows, *trailing]"""
    objects: Mapping[str, list[Any]] = field(default_factory=dict)
    """columns without dtype: one value per row"""

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indices: list[int]) -> Batch:
        """These rows, in this order."""
        return Batch(
            tuple(self.keys[i] for i in indices),
            {name: column.select(indices) for name, column in self.columns.items()},
            {name: values[torch.tensor(indices, dtype=torch.int64)] for name, values in self.rows.items()},
            {name: [values[i] for i in indices] for name, values in self.objects.items()},
        )

    def row(self, i: int) -> dict[str, Any]:
        """Every column of row i."""
        return {
            **{name: column.row(i) for name, column in self.columns.items()},
            **{name: values[i] for name, values in self.rows.items()},
            **{name: values[i] for name, values in self.objects.items()},
        }
