"""What a modality is: everything in which runs whose students make different things differ.

`modality_of(config)` gives the modality of a run. The other rooms ask it for parts and never look at which one it is.
Each process of a run has a modality of its own; only the config travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.config.schema import RunConfig
from tutelage.data.notes import Progress, Report, silent
from tutelage.data.prompts import Prompts
from tutelage.data.trajectory import Trajectory
from tutelage.engines.contract import Engine
from tutelage.engines.registry import Role
from tutelage.errors import UserError
from tutelage.learner.ranks import Ranks
from tutelage.learner.step import Learner
from tutelage.modality.demands import Demand, check_demands
from tutelage.models.causal_lm import CausalLM
from tutelage.queue.contract import SampleQueue
from tutelage.rewards.contract import Media
from tutelage.rollout.contract import LOOPS, EpisodeKind, Send
from tutelage.rollout.loops import single_turn  # noqa: F401  # registers the loop
from tutelage.rollout.runner import RolloutRequest
from tutelage.rollout.worker import AgentLoopWorker
from tutelage.teachers.client import ResidentTeacher, TeacherClient
from tutelage.teachers.pool import Scorer, TeacherPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tutelage.modality.diffusion import DiffusionModality
    from tutelage.modality.text import TextModality
    from tutelage.models.tokenizers import SafeTokenizer

Spread = Callable[[CausalLM], None]
"""Shards a model over the ranks, in place, before its parameters are handed out. With several ranks it also applies
`learner.activation_checkpointing`."""
E = TypeVar("E", covariant=True)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks before a run have found."""

    vocabulary: int
    """token ids that student and teachers share; 0 without tokens"""
    prompts: Prompts
    """without the rows that the recipe leaves out"""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The models of a run that lives in one process."""

    checked: Checked
    learner: Learner
    student: Engine
    teachers: Mapping[str, Engine]
    reference: Engine | None = None
    """the engine of the student as it was before training, if the algorithm compares with it"""


class ByModality(Protocol[E]):
    """One of something, such as an evaluator or a planner, for each thing that a student can make."""

    def of_text(self, modality: TextModality) -> E: ...

    def of_media(self, modality: DiffusionModality) -> E: ...


class Modality(ABC):
    """Builds the parts of one run that depend on what its student makes. `report` gets notes for the user."""

    config: RunConfig
    library: ClassVar[str]
    """The library that loads what `export` writes."""
    adapter_library: ClassVar[str]
    """The library that loads an adapter that is kept apart."""

    def __init__(self, config: RunConfig, report: Report = silent) -> None:
        self.config, self.report = config, report

    # ── on the driver, before anything starts ────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def require_packages(self) -> None:
        """Raise a UserError that names the extra to install if an optional package is missing."""

    def check_engines(self) -> None:
        """Refuse, by name, what the recipe asks of an engine that cannot do it."""
        check_demands(self._demands())

    @abstractmethod
    def _demands(self) -> Iterable[Demand]:
        """What the recipe asks of its engines."""

    @property
    @abstractmethod
    def tokenizer(self) -> SafeTokenizer | None:
        """The student's, loaded on first use; None if it has no tokens."""

    @abstractmethod
    def check(self, prompts: Prompts, progress: Progress) -> Checked:
        """Check that models, teachers and prompts fit together, from files alone: no model is loaded."""

    @abstractmethod
    def embed(self, prompts: Prompts, queue: SampleQueue, device: str, progress: Progress) -> Embedded:
        """Load all models into this process and check that they and the prompts fit together."""

    # ── in the process of a part ─────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def engine(self, role: Role, teacher: str, vocabulary: int, device: str) -> Engine:
        """Load one replica of the student, of the teacher of that name, or of the reference."""

    @abstractmethod
    def learner(self, queue: SampleQueue, vocabulary: int, device: str, ranks: Ranks, spread: Spread) -> Learner:
        """Load one rank of the learner."""

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether the run needs an engine with the student as it was before training."""

    @property
    @abstractmethod
    def has_adapter(self) -> bool:
        """Whether the student learns a LoRA adapter instead of its own weights."""

    def teacher_scorer(self, name: str, engine: Engine, vocabulary: int, device: str) -> Scorer:
        """Return what scores for a replica of that teacher: its engine, or a cache in front of it."""
        return engine

    # ── what episodes are made of ────────────────────────────────────────────────────────────────────────────────────

    def loops(self, send: Send) -> AgentLoopWorker:
        """Build the agent loops, which send their requests to the student with `send`."""
        known = {name: build() for name, build in LOOPS.items()}
        chosen = self.config.rollout.agent_loop
        if chosen not in known:
            names = ", ".join(sorted(known))
            raise UserError(f"rollout.agent_loop: no loop is named {chosen!r}; there are {names}")
        return AgentLoopWorker(known, chosen, self._episodes(send))

    @abstractmethod
    def _episodes(self, send: Send) -> EpisodeKind: ...

    @abstractmethod
    def reward_input(self, trajectory: Trajectory) -> tuple[str, Media | None]:
        """What rewards see of a trajectory: its text, or its image or video."""

    def teacher_client(self, pools: Mapping[str, TeacherPool]) -> TeacherClient:
        residents = {name: self._resident(name, index, pools[name]) for index, name in enumerate(self.config.teachers)}
        return TeacherClient(residents, self.config.data.teacher_column)

    def _router(self) -> TeacherClient:
        """A client whose teachers have no replicas yet; it knows which rows go to whom."""
        return self.teacher_client({name: TeacherPool(name, []) for name in self.config.teachers})

    @abstractmethod
    def _resident(self, name: str, index: int, pool: TeacherPool) -> ResidentTeacher: ...

    @abstractmethod
    def algorithm(self, heads: Sequence[TeacherHead] = ()) -> Algorithm:
        """Build the algorithm. `heads` are those of teachers whose full distribution it compares with."""

    @abstractmethod
    def training_request(self, algorithm: Algorithm, step: int, version: int) -> RolloutRequest:
        """What a training step asks of its episodes, and of teachers for the algorithm."""

    # ── measures, plans, exports ─────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def choose(self, choices: ByModality[E]) -> E:
        """Choose the one that fits."""

    @abstractmethod
    def step_metrics(self, actions: int, rows: int, seconds: float) -> dict[str, float]:
        """How much a training step learned from: `actions` of `rows` trajectories in `seconds`."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Tokens as the record shows them; a modality without tokens has none."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What the user should know about the samples of this run."""

    @abstractmethod
    def export(
        self, tensors: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype | None, out: Path, keep_adapter: bool
    ) -> torch.dtype:
        """Write the student with the weights of a checkpoint to `out`, as the library that it comes from loads it.
        Returns the dtype of the model; `dtype` is in place of the one that the settings choose."""
