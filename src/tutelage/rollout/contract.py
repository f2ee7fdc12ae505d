"""The contract of agent loops, and their registry.

    @agent_loop("my_loop")
    class MyLoop:
        async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
            tokens = context.render(prompt)
            answer = await context.generate(tokens)
            return context.episode(prompt, [context.trajectory(tokens, answer)])

A text loop gets token ids and a generate function; an image or video loop gets the prompt's text and a paint function.
A loop does not know whether generation runs in this process, on Ray or behind HTTP. Later turns append to the ids that
the engine saw; nothing is re-tokenised from text.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.data.messages import Message
from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import AnyOutput, AnyRequest, DiffusionOutput, DiffusionSampling, Generation, Sampling
from tutelage.errors import UserError
from tutelage.isolation.handover import redefines


class Tokenizer(Protocol):
    """The tokenizer functions that loops need. Implementations allow one thread at a time."""

    def render(self, messages: Sequence[Message]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def __hash__(self) -> int: ...


class PromptTooLong(UserError):
    """A prompt longer than data.max_prompt_tokens, or one that leaves no room for an answer."""

    @classmethod
    def of(cls, prompt: Prompt, tokens: int, limit: int) -> PromptTooLong:
        return cls(
            f"{prompt}: the prompt has {tokens} tokens, data.max_prompt_tokens allows {limit}: "
            "shorten it, or raise the limit (and engine.context, if need be)"
        )


def render_prompt(tokenizer: Tokenizer, prompt: Prompt, limit: int) -> Tensor:
    """Return the token ids of a prompt: its chat messages through the template, or its plain text."""
    ids = _ids(tokenizer, prompt.text, prompt.messages)
    if len(ids) > limit:
        raise PromptTooLong.of(prompt, len(ids), limit)
    return ids.clone()  # a loop may modify its copy


@lru_cache(maxsize=256)
def _ids(tokenizer: Tokenizer, text: str | None, messages: tuple[Message, ...]) -> Tensor:
    """Return the token ids. They are cached, as all samples of a prompt need the same ones."""
    ids = tokenizer.encode(text) if text is not None else tokenizer.render(messages)
    return torch.tensor(ids, dtype=torch.int64)


UNBOUNDED = 1 << 62
"""Context length, in tokens, if the limit is not known."""

Send = Callable[[AnyRequest], Awaitable[AnyOutput]]
"""Sends a request to one of the student's engines."""


@dataclass(slots=True)
class LoopContext:
    """The functions that a loop can use in one episode.

    A text loop uses `render`, `generate` and `trajectory`; an image or video loop uses `paint` and `painting`. Each
    modality implements its own functions; calling the others stops the run with an error that names the loop to use.
    """

    key: EpisodeKey
    seed: int
    send: Send
    row: str
    """the name of its row in errors"""
    sampling: Sampling | DiffusionSampling
    """default sampling settings"""
    turns: int = field(default=0, init=False)
    timings: dict[str, float] = field(default_factory=dict, init=False)
    started: float = field(default_factory=time.perf_counter, init=False)

    def render(self, prompt: Prompt) -> Tensor:
        """Return the token ids of the prompt. Raises PromptTooLong if they exceed the limit."""
        raise _needs_diffusion_loop()

    def room(self, tokens: Tensor) -> int:
        """Return the number of tokens that fit after these into engine.context."""
        raise _needs_diffusion_loop()

    async def generate(self, tokens: Tensor, sampling: Sampling | None = None) -> Generation:
        """Generate a continuation of these ids with the student. Every call of an episode uses its own seed.

        If engine.context is full, the answer ends with finish `length`, possibly without any token. If there is no
        room in the first call of an episode, PromptTooLong is raised, as there would be nothing to learn from.
        """
        raise _needs_diffusion_loop()

    def trajectory(self, tokens: Tensor, generation: Generation) -> Trajectory:
        """Return a trajectory of one turn: the given ids, then those of the student."""
        raise _needs_diffusion_loop()

    async def paint(self, prompt: str, negative: str | None = None) -> DiffusionOutput:
        """Generate an image or video for the prompt with the student. Every call of an episode uses its own seed."""
        raise _needs_text_loop()

    def painting(self, painted: DiffusionOutput) -> Trajectory:
        """Return a trajectory of denoising steps. The encoded prompt is stored only with the first sample."""
        raise _needs_text_loop()

    def episode(self, prompt: Prompt, trajectories: Sequence[Trajectory], reward_from: int = -1) -> Episode:
        """Return the finished episode, with its timings. `reward_from` is the index of the rewarded trajectory."""
        timings = {**self.timings, "total": time.perf_counter() - self.started}
        return Episode(self.key, prompt, tuple(trajectories), reward_from, timings)

    def _next(self) -> tuple[str, int, tuple[Any, ...]]:
        """Return the id, seed and order of the next request."""
        turn, self.turns = self.turns, self.turns + 1
        return f"{'/'.join(map(str, self.key))}/{turn}", derive_seed(self.seed, turn), (*self.key, turn)

    def _took(self, seconds: Mapping[str, float]) -> None:
        for phase, spent in seconds.items():
            name = "generate" if phase == "run" else phase
            self.timings[name] = self.timings.get(name, 0.0) + spent


def _needs_diffusion_loop() -> UserError:
    return UserError("this loop generates text, but the student is a diffusion model: use agent_loop diffusion")


def _needs_text_loop() -> UserError:
    return UserError(
        "this loop generates images or video, but the student is a language model: use agent_loop single_turn"
    )


class EpisodeKind(Protocol):
    """The functions of a modality that agent-loop workers need."""

    def context(self, key: EpisodeKey, seed: int, sampling: Any, row: str) -> LoopContext:
        """Return the context of one episode; `row` is the name of its row in errors."""

    def finished(self, episode: Episode) -> Episode:
        """Return the episode of a loop without data that is not trained on. Raises ValueError if it is unusable."""


class AgentLoop(Protocol):
    """Runs one episode from a prompt."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode: ...


LOOPS: dict[str, Callable[[], AgentLoop]] = {}


def register(name: str) -> Callable[[type], type]:
    """Register a loop under the name by which recipes and rows choose it."""

    def add(loop: type) -> type:
        known = LOOPS.get(name, loop)
        if known is not loop and not redefines(known, loop):
            raise ValueError(f"an agent loop named {name!r} is registered already")
        LOOPS[name] = loop
        return loop

    return add
