"""What an engine does: it generates and scores. A language engine takes token ids, and text never reaches it, except to
look for stop strings; a diffusion engine takes a prompt and gives media with the denoising steps that made them.

`generate` may be aborted and then returns what it has. Where the engine's context ends before `max_tokens`, the answer
ends there with finish `length`, without a token if the request fills the context. `score` looks at action positions
only and returns arrays that align with them. `load` takes new weights and forgets every cache of older ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tutelage.config.engines import Abilities, ScoreField
from tutelage.data.trajectory import Key
from tutelage.policy.constraints import ConstrainedSpan, Constraint


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. The log-prob that is reported is after temperature, within the constraint and before
    truncation."""

    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1"""
    top_p: float = 1.0
    top_k: int = 0
    """0 is the whole vocabulary"""
    min_tokens: int = 0
    """stop conditions before this many tokens are ignored (their ids cannot be drawn, unless a constraint allows no
    others)"""
    max_tokens: int = 128
    """at most as many as the engine's context has room for"""
    stop_ids: tuple[int, ...] = ()
    """ids that end the generation; the id itself is kept"""
    stop_strings: tuple[str, ...] = ()
    """strings that end the generation; the text up to and including the string is kept"""
    top_ids: int = 0
    """also report the ids of so many most likely tokens at every position"""
    constraint: Constraint | None = None
    """what the answer must follow; an end-of-turn id ends it, a stop condition or `max_tokens` may cut it"""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    id: str
    """for abort and for errors"""
    tokens: Tensor
    """int64 [length]"""
    sampling: Sampling
    seed: int
    """the draw depends on this, on the tokens and on the weights; not on what shares the batch"""
    order: tuple[Any, ...] = ()
    """requests are admitted in this order, e.g. the episode's key"""


Finish = Literal["stop", "length", "abort"]
"""A stop condition, `max_tokens` or the end of the engine's context, an abort."""


@dataclass(frozen=True, slots=True)
class Generation:
    tokens: Tensor
    """int64 [new]"""
    logp: Tensor
    """float32 [new]"""
    version: Tensor
    """int32 [new]"""
    finish: Finish
    top_ids: Tensor | None = None
    """int64 [new, k]: if they were asked for"""
    constraint: Constraint | None = None
    """what the tokens were drawn under"""
    forced: Tensor | None = None
    """bool [new]: with a constraint, true for tokens that were the only ones allowed, which are no actions"""
    mass_cut: float = 0.0
    """mean probability, over actions, of what could not be drawn: cut by top-p and top-k, or stop ids before
    min_tokens"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """wait (until admitted) and run"""

    @property
    def acted(self) -> Tensor:
        """bool [new]: true for tokens that are actions, which is all of them but those that a constraint forced"""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.forced is None else ~self.forced


@dataclass(frozen=True, slots=True)
class DiffusionSampling:
    """How to denoise: the same for all media of a training step, or of an evaluation."""

    steps: int
    height: int
    width: int
    frames: int = 1
    guidance: float = 1.0
    negative: str = ""
    """what guidance leads away from, where a row names nothing itself"""
    kind: Literal["sde", "cps", "ode"] = "ode"
    noise_level: float = 0.0
    """of the steps in the window; all others are deterministic"""
    window: tuple[int, int] = (0, 0)
    """half-open: the steps that are random, and trained"""
    times: int = 0
    """noise levels to put finished media at, for losses that learn from those (forward process)"""
    capture: bool = False
    """give the latents of trained steps, and what the model was conditioned on"""
    stages: bool = False
    """give what the picture looked like before every step, and at the end"""
    means: bool = False
    """with `capture`: give the means that trained steps were drawn around"""


@dataclass(frozen=True, slots=True)
class DiffusionRequest:
    id: str
    """for abort and for errors"""
    prompt: str
    negative: str
    sampling: DiffusionSampling
    seed: int
    """all noise depends on this alone; not on what shares the batch"""
    order: tuple[Any, ...] = ()
    """requests are admitted in this order, e.g. the episode's key"""


@dataclass(frozen=True, slots=True)
class DiffusionOutput:
    """A finished picture or video. Steps that are trained are its actions."""

    media: Tensor
    """uint8 [channels, height, width], or [frames, channels, height, width] for a video"""
    sigmas: Tensor
    """float32 [steps]: noise before each step (of the forward process: where the media were put)"""
    timesteps: Tensor
    """float32 [steps]: the same in the unit that the model was trained with"""
    mask: Tensor
    """bool [steps]: true where the step is trained"""
    logp: Tensor
    """float32 [actions]: mean over the dimensions; 0 where nothing was drawn from a Gaussian"""
    version: Tensor
    """int32 [actions]"""
    latents: Tensor | None = None
    """float32 [actions, …]: before each trained step"""
    targets: Tensor | None = None
    """float32 [actions, …]: latents after each trained step; of the forward process, noise minus data"""
    means: Tensor | None = None
    """float32 [actions, …]: of the Gaussians that the targets were drawn from, if they were asked for"""
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)
    """what the prompt was encoded to, by name"""
    stages: Tensor | None = None
    """uint8 [steps + 1, …]"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """wait (until admitted) and run"""


@dataclass(frozen=True, slots=True)
class Want:
    """What a score request asks for, per action position."""

    sampled: bool = False
    """log-prob of the token that was taken"""
    top_k: int = 0
    """ids and log-probs of the k most likely tokens"""
    given: bool = False
    """log-probs of the ids that the request names"""
    hidden: bool = False
    """final hidden state: with the output head, the full distribution"""
    step_mean: bool = False
    """of denoising steps: where the scorer would have gone"""

    def fields(self) -> tuple[ScoreField, ...]:
        """The names of what is asked for."""
        asked: dict[ScoreField, bool] = {
            "sampled": self.sampled,
            "top_k": self.top_k > 0,
            "given": self.given,
            "hidden": self.hidden,
            "step_mean": self.step_mean,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score the action positions of one sequence."""

    key: Key
    tokens: Tensor
    """int64 [length]: the scorer's own context and the student's actions"""
    spans: tuple[tuple[int, int], ...]
    """action positions in `tokens`: half-open, in order"""
    want: Want
    route: str
    """name of the teacher"""
    deadline: float | None = None
    """seconds from submission"""
    ids: Tensor | None = None
    """int64 [actions, k]: the ids that `want.given` is about"""
    constraints: tuple[ConstrainedSpan, ...] = ()
    """spans of `tokens` that were drawn under a constraint: log-probs are within what it allows"""


@dataclass(frozen=True, slots=True)
class StepScoreRequest:
    """Score the trained denoising steps of one medium."""

    key: Key
    prompt: str
    negative: str
    sampling: DiffusionSampling
    latents: Tensor
    """float32 [actions, …]: before each step"""
    sigmas: Tensor
    """float32 [actions]"""
    sigmas_next: Tensor
    """float32 [actions]"""
    want: Want
    route: str
    """name of the teacher"""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Aligned to the action positions of the request, in order."""

    logp: Tensor | None = None
    """float32 [actions]"""
    topk_ids: Tensor | None = None
    """int64 [actions, k]"""
    topk_logp: Tensor | None = None
    """float32 [actions, k]"""
    given_logp: Tensor | None = None
    """float32 [actions, k]: of the ids that the request named"""
    hidden: Tensor | None = None
    """float32 [actions, width]"""
    step_mean: Tensor | None = None
    """float32 [actions, …]"""
    mass_outside: Tensor | None = None
    """float32 [actions]: probability, at temperature 1, of the ids that the student does not share; None if there are
    none"""


class EngineError(RuntimeError):
    """An engine could not serve a request."""


AnyRequest = GenerateRequest | DiffusionRequest
AnyOutput = Generation | DiffusionOutput
AnyScoreRequest = ScoreRequest | StepScoreRequest


@dataclass(slots=True)
class EngineCounts:
    """What an engine has done; every engine adds counts of its own."""

    generate_seconds: float = 0.0
    score_seconds: float = 0.0


class Engine(ABC):
    """A generation and scoring back end. Nothing here says when or where it computes: an engine may be driven by the
    scheduler of this process (`engines.embedded`), run in a process of its own, or be a server elsewhere."""

    abilities: Abilities
    """what it can do; a request beyond that raises EngineError"""
    version: int
    """of the weights that it computes with"""
    shares_weights: bool
    """whether the learner's tensors are its own, so that nothing has to be copied into it"""
    counts: EngineCounts

    @abstractmethod
    async def generate(self, request: AnyRequest) -> AnyOutput:
        """Continue tokens or make media. An aborted request returns its partial output."""

    @abstractmethod
    async def score(self, request: AnyScoreRequest) -> Scores:
        """Score the actions of one trajectory."""

    @abstractmethod
    def abort(self, id: str) -> None:
        """End a generation; its `generate` returns the partial output. Unknown ids are ignored."""

    @abstractmethod
    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        """Take weights of that version (None: the weights are shared and already in place) and drop old caches."""

    async def sleep(self) -> None:  # noqa: B027  (most engines have nothing to free)
        """Free the memory of the device until weights are loaded; no request may come before that. An engine that
        cannot leaves this as it is."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that wait or are under way."""

    @property
    def identity(self) -> str:
        """A name that changes with the weights, for an engine whose weights are not files here: the address, the model
        and what was found out about the server. Empty: the files of its path identify it."""
        return ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start what the engine needs on entry and stop it on exit. An engine that needs nothing leaves this as it
        is."""
        yield
