"""The part of a plan that depends on what the student makes: how episodes are made, what columns hold, what models
need. There is one planner for each modality."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tutelage.algorithms.contract import Algorithm
from tutelage.config.pools import Member, pool_members
from tutelage.config.schema import ModelSettings, PoolSettings, RunConfig
from tutelage.data.trajectory import Span
from tutelage.planning.memory import Item


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a step."""

    name: str
    detail: str
    parts: tuple[Stage, ...] = ()
    """Its concurrent parts."""


@dataclass(frozen=True, slots=True)
class SpanCount:
    """The values of a step that columns of one span have."""

    unit: str
    """What one value belongs to, such as an action."""
    count: int


class Planner(ABC):
    """Plans what depends on the modality, from the settings and the config files of models."""

    config: RunConfig
    algorithm: Algorithm

    @property
    def rows(self) -> int:
        """The number of trajectories in a step, one per episode."""
        return self.config.prompts_per_step * self.config.rollout.samples

    @property
    @abstractmethod
    def actions(self) -> int:
        """The number of actions of a row, at most."""

    @property
    @abstractmethod
    def step_name(self) -> str:
        """What the columns of a step are called among uses of memory."""

    @property
    @abstractmethod
    def longest(self) -> str:
        """The rows and actions of a step, as text."""

    @property
    @abstractmethod
    def episode(self) -> str:
        """How an episode is made, as text."""

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether a loss compares with the student as it was before training."""

    @property
    @abstractmethod
    def spans(self) -> Mapping[Span, SpanCount]:
        """The number of values in a step by the span of a column, at most."""

    @abstractmethod
    def penalties(self) -> Iterator[Stage]:
        """Yield what the loss adds to that of the algorithm."""

    @abstractmethod
    def carried(self) -> frozenset[str]:
        """The names of optional columns that rows have although the algorithm does not need them."""

    @abstractmethod
    def dims(self, column: str) -> tuple[int | None, ...]:
        """The dimensions of one value of a column; None is one that is unknown until the models have been made."""

    @abstractmethod
    def embedded(self) -> Iterator[Item]:
        """Yield the memory of a run in one process, without the columns of a step."""

    @abstractmethod
    def on_device(self, member: Member, pool: PoolSettings) -> Iterator[Item]:
        """Yield the memory that a member needs on a device of its pool."""

    def _models(self) -> dict[str, ModelSettings]:
        """All models by their key in the recipe."""
        return {"student": self.config.student} | {f"teachers.{n}": t for n, t in self.config.teachers.items()}

    def _as_placed(self, key: str, settings: ModelSettings) -> tuple[ModelSettings, str]:
        """Return the settings of a model with the dtype that it has in this run, and its device. A GPU of a cluster has
        bfloat16 unless the recipe says otherwise."""
        member = "engine.pool" if key == "student" else f"{key}.pool"
        on_gpu = self.config.runtime == "ray" and any(
            self.config.pools[each.pool].device == "gpu" for each in pool_members(self.config) if each.key == member
        )
        if not on_gpu:
            return settings, "cpu"
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        return settings.model_copy(update={"dtype": dtype}), "cuda"
