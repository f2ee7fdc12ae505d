"""What an agent loop is, and how a loop gets its name.

    @register("my_loop")
    class MyLoop:
        async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
            tokens = context.render(prompt)
            answer = await context.generate(tokens)
            return context.episode(prompt, [context.trajectory(tokens, answer)])

A loop sees token ids and a generate function. Whether generation happens in this process, on Ray or behind HTTP is
none of its business. Later turns append to the ids that the engine saw; nothing is re-tokenised from text.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from understudy.data.trajectory import Episode, EpisodeKey, Message, Prompt, Trajectory
from understudy.engines.contract import GenerateRequest, Generation, Sampling
from understudy.errors import UserError


class Tokenizer(Protocol):
    """What loops need of a tokenizer; the implementation lets only one thread in at a time."""

    def render(self, messages: Sequence[Message]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class PromptTooLong(UserError):
    """A prompt longer than data.max_prompt_tokens."""


def render_prompt(tokenizer: Tokenizer, prompt: Prompt, limit: int) -> Tensor:
    """Token ids of a prompt: its chat messages through the template, or its plain text."""
    ids = tokenizer.encode(prompt.text) if prompt.text is not None else tokenizer.render(prompt.messages)
    if len(ids) > limit:
        raise PromptTooLong(
            f"{prompt}: the prompt has {len(ids)} tokens, data.max_prompt_tokens allows {limit}: "
            "shorten it, or raise the limit (and engine.context, if need be)"
        )
    return torch.tensor(ids, dtype=torch.int64)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from names and numbers, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class LoopContext:
    """What one episode has at hand."""

    key: EpisodeKey
    seed: int
    sampling: Sampling
    tokenizer: Tokenizer
    max_prompt_tokens: int
    send: Callable[[GenerateRequest], Awaitable[Generation]]
    turns: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def render(self, prompt: Prompt) -> Tensor:
        """Token ids of the prompt; PromptTooLong if they pass the limit."""
        return render_prompt(self.tokenizer, prompt, self.max_prompt_tokens)

    async def generate(self, tokens: Tensor, sampling: Sampling | None = None) -> Generation:
        """The student continues these ids. Every call of an episode draws from a seed of its own."""
        turn, self.turns = self.turns, self.turns + 1
        request = GenerateRequest(
            id=f"{'/'.join(map(str, self.key))}/{turn}",
            tokens=tokens,
            sampling=sampling or self.sampling,
            seed=derive_seed(self.seed, turn),
            order=(*self.key, turn),
        )
        generation = await self.send(request)
        for phase, seconds in generation.seconds.items():
            name = "generate" if phase == "run" else phase
            self.timings[name] = self.timings.get(name, 0.0) + seconds
        return generation

    def trajectory(self, tokens: Tensor, generation: Generation) -> Trajectory:
        """A trajectory of one turn: given ids, then the student's."""
        mask = torch.zeros(len(tokens) + len(generation.tokens), dtype=torch.bool)
        mask[len(tokens) :] = True
        return Trajectory(
            tokens=torch.cat([tokens, generation.tokens]),
            mask=mask,
            behaviour_logp=generation.logp,
            version=generation.version,
            finish=generation.finish,
            metrics={"mass_cut": generation.mass_cut},
            extra={} if generation.top_ids is None else {"student_topk_ids": generation.top_ids},
        )

    def episode(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Episode:
        """The finished episode, with its timings."""
        episode = Episode(self.key, prompt, tuple(trajectories))
        return replace(episode, timings={**self.timings, "total": time.perf_counter() - self.started})


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
