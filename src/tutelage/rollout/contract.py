"""What an agent loop is, and how a loop gets its name.

    @agent_loop("my_loop")
    class MyLoop:
        async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
            tokens = context.render(prompt)
            answer = await context.generate(tokens)
            return context.episode(prompt, [context.trajectory(tokens, answer)])

A loop sees token ids and a generate function; one that paints sees the prompt's text and a paint function. Whether
generation happens in this process, on Ray or behind HTTP is none of its business. Later turns append to the ids that
the engine saw; nothing is re-tokenised from text.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import NO_TOKENS, Episode, EpisodeKey, Message, Prompt, Trajectory
from tutelage.engines.contract import (
    DiffusionOutput,
    DiffusionRequest,
    DiffusionSampling,
    GenerateRequest,
    Generation,
    Sampling,
)
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

Send = Callable[[Any], Awaitable[Any]]
"""To one of the student's engines: GenerateRequest → Generation, DiffusionRequest → DiffusionOutput."""


@dataclass(slots=True)
class LoopContext:
    """What one episode has at hand."""

    key: EpisodeKey
    seed: int
    sampling: Sampling | DiffusionSampling
    tokenizer: Tokenizer | None
    """of a student that writes"""
    max_prompt_tokens: int
    send: Send
    row: str = "the prompt"
    """as errors call it"""
    context_tokens: int = UNBOUNDED
    """engine.context: tokens that a sequence may have"""
    turns: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def render(self, prompt: Prompt) -> Tensor:
        """Token ids of the prompt; PromptTooLong if they pass the limit."""
        if self.tokenizer is None:
            raise UserError("this loop writes, but the student of the run paints: use agent_loop diffusion")
        return render_prompt(self.tokenizer, prompt, self.max_prompt_tokens)

    def room(self, tokens: Tensor) -> int:
        """Tokens that can still follow these before engine.context ends."""
        return max(self.context_tokens - tokens.shape[0], 0)

    async def generate(self, tokens: Tensor, sampling: Sampling | None = None) -> Generation:
        """The student continues these ids. Every call of an episode draws from a seed of its own.

        Where engine.context ends first, the answer ends with finish `length`: without a token, if there was no room at
        all. In the first call of an episode that is an error (PromptTooLong): there would be nothing to learn from."""
        chosen = sampling or self.sampling
        assert isinstance(chosen, Sampling)
        first = self.turns == 0
        id, seed, order = self._next()
        generation: Generation = await self.send(GenerateRequest(id, tokens, chosen, seed, order))
        if first and generation.finish == "length" and not generation.tokens.shape[0]:
            raise PromptTooLong(
                f"{self.row}: its {tokens.shape[0]} tokens leave no room for an answer in engine.context: "
                "shorten it, or raise engine.context"
            )
        self._took(generation.seconds)
        return generation

    async def paint(self, prompt: str, negative: str | None = None) -> DiffusionOutput:
        """The student paints what the prompt says. Every call of an episode draws from a seed of its own."""
        if not isinstance(self.sampling, DiffusionSampling):
            raise UserError("this loop paints, but the student of the run writes: use agent_loop single_turn")
        id, seed, order = self._next()
        unwanted = self.sampling.negative if negative is None else negative
        painted: DiffusionOutput = await self.send(DiffusionRequest(id, prompt, unwanted, self.sampling, seed, order))
        self._took(painted.seconds)
        return painted

    def _next(self) -> tuple[str, int, tuple[Any, ...]]:
        """Id, seed and order of the next request."""
        turn, self.turns = self.turns, self.turns + 1
        return f"{'/'.join(map(str, self.key))}/{turn}", derive_seed(self.seed, turn), (*self.key, turn)

    def _took(self, seconds: Mapping[str, float]) -> None:
        for phase, spent in seconds.items():
            name = "generate" if phase == "run" else phase
            self.timings[name] = self.timings.get(name, 0.0) + spent

    def trajectory(self, tokens: Tensor, generation: Generation) -> Trajectory:
        """A trajectory of one turn: given ids, then the student's."""
        both = torch.cat([tokens, generation.tokens])
        return Trajectory(
            tokens=both,
            mask=torch.arange(both.shape[0]) >= tokens.shape[0],
            behaviour_logp=generation.logp,
            version=generation.version,
            finish=generation.finish,
            metrics={"mass_cut": generation.mass_cut},
            extra={} if generation.top_ids is None else {"student_topk_ids": generation.top_ids},
        )

    def painting(self, painted: DiffusionOutput) -> Trajectory:
        """A trajectory of denoising steps. What the prompt was encoded to is stored once: with its first sample."""
        extra: dict[str, Any] = {
            "media": painted.media,
            "sigmas": painted.sigmas,
            "timesteps": painted.timesteps,
            "sampler": _plain(self.sampling),
        }
        for name in ("latents", "targets", "means", "stages"):
            if (tensor := getattr(painted, name)) is not None:
                extra[name] = tensor
        if self.key.sample == 0:
            extra |= painted.conditioning
        return Trajectory(NO_TOKENS, painted.mask, painted.logp, painted.version, extra=extra)

    def episode(self, prompt: Prompt, trajectories: Sequence[Trajectory], reward_from: int = -1) -> Episode:
        """The finished episode, with its timings; `reward_from` is the trajectory whose reward is the episode's."""
        timings = {**self.timings, "total": time.perf_counter() - self.started}
        return Episode(self.key, prompt, tuple(trajectories), reward_from, timings)


@lru_cache(maxsize=16)
def _plain(sampling: Sampling | DiffusionSampling) -> dict[str, Any]:
    """As JSON holds it; the same for all episodes of a step."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()}


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
