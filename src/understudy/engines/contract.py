"""What an engine does: it generates and scores token ids. Text never reaches it, except to look for stop strings.

`generate` may be aborted and then returns what it has. `score` looks at action positions only and returns arrays that
align with them. `load` takes new weights and forgets every cache of older ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from understudy.data.trajectory import Key


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. The log-prob that is reported is after temperature and before truncation."""

    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1"""
    top_p: float = 1.0
    top_k: int = 0
    """0 is the whole vocabulary"""
    min_tokens: int = 0
    """stop conditions before this many tokens are ignored (their ids cannot be drawn)"""
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    """ids that end the generation; the id itself is kept"""
    stop_strings: tuple[str, ...] = ()
    """strings that end the generation; the text up to and including the string is kept"""
    top_ids: int = 0
    """also report the ids of so many most likely tokens at every position"""


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
    mass_cut: float = 0.0
    """mean probability of what could not be drawn: cut by top-p and top-k, or stop ids before min_tokens"""
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
    mass_outside: Tensor | None = None
    """float32 [actions]: probability, at temperature 1, of the ids that the student does not share; None if there are
    none"""


class EngineError(RuntimeError):
    """An engine could not serve a request."""


class Engine(Protocol):
    """A generation and scoring back end."""

    async def generate(self, request: GenerateRequest) -> Generation: ...

    async def score(self, request: ScoreRequest) -> Scores: ...

    def abort(self, id: str) -> None:
        """End a generation; its `generate` returns the partial output. Unknown ids are ignored."""

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        """Take weights of that version (None: the weights are shared and already in place) and drop old caches."""
