"""What an agent loop is, and how a loop gets its name.

    @agent_loop("my_loop")
    class MyLoop:
        async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
            tokens = context.render(prompt)
            answer = await context.generate(tokens)
            return context.episode(prompt, [context.trajectory(tokens, answer)])

A loop sees token ids and a generate function; one that paints sees the prompt's text and a paint function. It does not
know whether generation happens in this process, on Ray or behind HTTP. Later turns append to the ids that the engine
saw; nothing is re-tokenised from text.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Episode, EpisodeKey, Message, Prompt, Trajectory
from tutelage.engines.contract import AnyOutput, AnyRequest, DiffusionOutput, DiffusionSampling, Generation, Sampling
from tutelage.errors import UserError


class Tokenizer(Protocol):
    """What loops need of a tokenizer; the implementation lets only one thread in at a time."""

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
    """Token ids of a prompt: its chat messages through the template, or its plain text."""
    ids = _ids(tokenizer, prompt.text, prompt.messages)
    if len(ids) > limit:
        raise PromptTooLong.of(prompt, len(ids), limit)
    return ids.clone()  # a loop may change its own


@lru_cache(maxsize=256)
def _ids(tokenizer: Tokenizer, text: str | None, messages: tuple[Message, ...]) -> Tensor:
    """Remembered: all samples of a prompt ask for the same."""
    ids = tokenizer.encode(text) if text is not None else tokenizer.render(messages)
    return torch.tensor(ids, dtype=torch.int64)


UNBOUNDED = 1 << 62
"""Tokens of a context whose end is not known here."""

Send = Callable[[AnyRequest], Awaitable[AnyOutput]]
"""Sends a request to one of the student's engines."""


@dataclass(slots=True)
class LoopContext:
    """What one episode has at hand.

    A loop that writes uses `render`, `generate` and `trajectory`; one that paints uses `paint` and `painting`. Each
    modality implements its own; the others stop the run and say which loop to use."""

    key: EpisodeKey
    seed: int
    send: Send
    row: str
    """as errors call it"""
    sampling: Sampling | DiffusionSampling
    """how the student acts, unless a call says otherwise"""
    turns: int = field(default=0, init=False)
    timings: dict[str, float] = field(default_factory=dict, init=False)
    started: float = field(default_factory=time.perf_counter, init=False)

    def render(self, prompt: Prompt) -> Tensor:
        """Token ids of the prompt; PromptTooLong if they pass the limit."""
        raise _paints()

    def room(self, tokens: Tensor) -> int:
        """Tokens that can still follow these before engine.context ends."""
        raise _paints()

    async def generate(self, tokens: Tensor, sampling: Sampling | None = None) -> Generation:
        """The student continues these ids. Every call of an episode draws from a seed of its own.

        Where engine.context ends first, the answer ends with finish `length`: without a token, if there was no room at
        all. In the first call of an episode that is an error (PromptTooLong): there would be nothing to learn from."""
        raise _paints()

    def trajectory(self, tokens: Tensor, generation: Generation) -> Trajectory:
        """A trajectory of one turn: given ids, then the student's."""
        raise _paints()

    async def paint(self, prompt: str, negative: str | None = None) -> DiffusionOutput:
        """The student paints what the prompt says. Every call of an episode draws from a seed of its own."""
        raise _writes()

    def painting(self, painted: DiffusionOutput) -> Trajectory:
        """A trajectory of denoising steps. What the prompt was encoded to is stored once: with its first sample."""
        raise _writes()

    def episode(self, prompt: Prompt, trajectories: Sequence[Trajectory], reward_from: int = -1) -> Episode:
        """The finished episode, with its timings; `reward_from` is the trajectory whose reward is the episode's."""
        timings = {**self.timings, "total": time.perf_counter() - self.started}
        return Episode(self.key, prompt, tuple(trajectories), reward_from, timings)

    def _next(self) -> tuple[str, int, tuple[Any, ...]]:
        """Id, seed and order of the next request."""
        turn, self.turns = self.turns, self.turns + 1
        return f"{'/'.join(map(str, self.key))}/{turn}", derive_seed(self.seed, turn), (*self.key, turn)

    def _took(self, seconds: Mapping[str, float]) -> None:
        for phase, spent in seconds.items():
            name = "generate" if phase == "run" else phase
            self.timings[name] = self.timings.get(name, 0.0) + spent


def _paints() -> UserError:
    return UserError("this loop writes, but the student of the run paints: use agent_loop diffusion")


def _writes() -> UserError:
    return UserError("this loop paints, but the student of the run writes: use agent_loop single_turn")


class EpisodeKind(Protocol):
    """What episodes of a modality are made of."""

    def context(self, key: EpisodeKey, seed: int, sampling: Any, row: str) -> LoopContext:
        """The context of one episode; `row` is its prompt as errors call it."""

    def finished(self, episode: Episode) -> Episode:
        """What a loop returned, without what nothing is learned from. ValueError if it cannot be used."""


class AgentLoop(Protocol):
    """One way to turn a prompt into an episode."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode: ...


LOOPS: dict[str, Callable[[], AgentLoop]] = {}


def register(name: str) -> Callable[[type], type]:
    """Give a loop the name by which recipes and rows choose it."""

    def add(loop: type) -> type:
        if name in LOOPS and LOOPS[name] is not loop:
            raise ValueError(f"an agent loop named {name!r} is registered already")
        LOOPS[name] = loop
        return loop

    return add
