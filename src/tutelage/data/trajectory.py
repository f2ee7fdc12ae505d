"""The records that cross the doors of rooms: keys, prompts, trajectories, episodes, and the columns of a row.

A *prompt* is run `samples` times; each run is an *episode*; an episode yields 1..n *trajectories*; the episodes of
one prompt are a *group*. One trajectory becomes one row of the sample queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tutelage.data.messages import Message
from tutelage.data.ragged import Ragged


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

    @property
    def request(self) -> str:
        """What is asked, as people read it: the plain prompt, or the last user message."""
        if self.text is not None:
            return self.text
        users = [m.text for m in self.messages if m.role == "user"]
        return users[-1] if users else self.messages[-1].text

    def __str__(self) -> str:
        return f"row {self.row} of {self.source}"


NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence of actions by the student: token ids, or denoising steps.

    tokens          <system> <user> hi </> <assistant> Hello ! </>        sigmas           1.0  0.9  0.6  0.3
    mask             0        0     0  0   0           1     1 1          mask             0    1    1    0
    behaviour_logp                                    -0.2 -1.1 -0.1      behaviour_logp       -0.9 -0.7
                                           (action positions only)                     (trained steps only)
    """

    tokens: Tensor
    """int64 [length]: everything the student saw and wrote; empty (`NO_TOKENS`) where it paints"""
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
    """given by the loop itself; of an episode's trajectories the one named by `reward_from` counts"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """further declared columns"""

    @property
    def prompt_length(self) -> int:
        """Tokens before the turn of the first action (all of them if the student never acted). A turn may begin with
        forced tokens, which are no actions."""
        first = self.mask.numpy().tobytes().find(1)
        if first < 0:
            return len(self.mask)
        return next((start for start, end, *_ in self.extra.get("constraints", ()) if start <= first < end), first)

    @property
    def written(self) -> Tensor:
        """bool [length]: true where the student wrote: its actions, and tokens that a constraint forced"""
        return written(self.mask, self.extra.get("constraints", ()))

    def columns(self) -> dict[str, Any]:
        """The row that the queue stores; its reward is its episode's, see `Episode.rewarded`."""
        row = {"mask": self.mask, "behaviour_logp": self.behaviour_logp, "version": self.version, **self.extra}
        if self.tokens.shape[0]:
            row["tokens"] = self.tokens
        return row


def written(mask: Tensor, constraints: Sequence[Sequence[Any]]) -> Tensor:
    """Return the mask of a row with the forced tokens of its column `constraints`."""
    if not constraints:
        return mask
    mask = mask.clone()
    for start, end, *_ in constraints:
        mask[start:end] = True
    return mask


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished run of an agent loop."""

    key: EpisodeKey
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    reward_from: int = -1
    """index of the trajectory whose reward is the episode's, given by the loop or judged"""
    timings: Mapping[str, float] = field(default_factory=dict)
    """seconds by phase: wait (until admitted), generate, tools, …; `total` is the whole"""

    @property
    def rewarded(self) -> Trajectory:
        """The trajectory whose reward is the episode's: all rows of the episode carry it, and no other."""
        return self.trajectories[self.reward_from]


Span = Literal["sequence", "action", "step", "row", "group"]


@dataclass(frozen=True, slots=True)
class Column:
    """What a column holds. Declared once, checked at every put."""

    name: str
    dtype: torch.dtype | None
    """None: not a tensor but any value that JSON can hold, one per trajectory"""
    span: Span
    """sequence: one value per token; action: per action; step: per denoising step; row: one per trajectory; group: any
    number, stored once per prompt with the first trajectory of its first sample"""
    producer: str
    """the room that writes it"""
    trailing: tuple[int | None, ...] | None = ()
    """dims after the span's; None is any size, the same within a batch; None for all of them: any dims"""
    optional: bool = True
    """a row may be complete without it"""

    def __post_init__(self) -> None:
        if self.dtype is None and (self.span != "row" or self.trailing != ()):
            raise ValueError(f"column {self.name!r} has no dtype, so it holds one value per row: span row, no trailing")


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("tokens", torch.int64, "sequence", "agent_loop"),
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
        Column("constraints", None, "row", "agent_loop"),
        Column("sigmas", torch.float32, "step", "agent_loop"),
        Column("timesteps", torch.float32, "step", "agent_loop"),
        Column("latents", torch.float32, "action", "agent_loop", trailing=None),
        Column("targets", torch.float32, "action", "agent_loop", trailing=None),
        Column("means", torch.float32, "action", "agent_loop", trailing=None),
        Column("teacher_mean", torch.float32, "action", "teachers", trailing=None),
        Column("media", torch.uint8, "row", "agent_loop", trailing=None),
        Column("stages", torch.uint8, "row", "agent_loop", trailing=None),
        Column("sampler", None, "row", "agent_loop"),
        Column("text", torch.float32, "group", "agent_loop", trailing=(None,)),
        Column("pooled", torch.float32, "group", "agent_loop"),
        Column("negative_text", torch.float32, "group", "agent_loop", trailing=(None,)),
        Column("negative_pooled", torch.float32, "group", "agent_loop"),
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
    shared: Mapping[GroupKey, Mapping[str, Tensor]] = field(default_factory=dict)
    """group-span columns of the groups that the rows belong to"""

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indices: list[int]) -> Batch:
        """These rows, in this order."""
        return Batch(
            tuple(self.keys[i] for i in indices),
            {name: column.select(indices) for name, column in self.columns.items()},
            {name: values[torch.tensor(indices, dtype=torch.int64)] for name, values in self.rows.items()},
            {name: [values[i] for i in indices] for name, values in self.objects.items()},
            self.shared,
        )

    def row(self, i: int) -> dict[str, Any]:
        """Every column of row i."""
        return {
            **{name: column.row(i) for name, column in self.columns.items()},
            **{name: values[i] for name, values in self.rows.items()},
            **{name: values[i] for name, values in self.objects.items()},
        }
