"""Runs the episodes of all loops and modalities concurrently, and turns what goes wrong into a failure."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tutelage.data.trajectory import COLUMNS, Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import DiffusionSampling, Sampling
from tutelage.errors import UserError
from tutelage.rollout.contract import UNBOUNDED, AgentLoop, LoopContext, Send, Tokenizer

Outcome = TypeVar("Outcome")
Seed = Callable[[Prompt, int], int]
"""(prompt, sample) → seed of the episode"""


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An episode whose loop raised."""

    key: EpisodeKey
    prompt: Prompt
    reason: str
    detail: str
    """the traceback"""


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


@dataclass(frozen=True, slots=True)
class AgentLoopWorker:
    """Runs episodes; as many at the same time as it is asked to."""

    loops: Mapping[str, AgentLoop]
    default_loop: str
    tokenizer: Tokenizer | None
    max_prompt_tokens: int
    send: Send
    context_tokens: int = UNBOUNDED
    """engine.context"""

    async def stream(
        self,
        partition: str,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling | DiffusionSampling,
        seed: Seed,
        finish: Callable[[Episode | EpisodeFailure], Awaitable[Outcome]],
        attempt: int = 0,
    ) -> AsyncGenerator[Outcome, None]:
        """Run every prompt `samples` times; `finish` each episode when it ends, while others run, and yield the result.
        The first error ends them all."""
        finished: asyncio.Queue[Outcome | _Raised] = asyncio.Queue()

        async def one(prompt: Prompt, sample: int) -> None:
            key = EpisodeKey(partition, prompt.uid, sample, attempt)
            try:
                finished.put_nowait(await finish(await self.run(prompt, key, sampling, seed(prompt, sample))))
            except Exception as error:
                finished.put_nowait(_Raised(error))

        tasks = [asyncio.create_task(one(prompt, sample)) for prompt in prompts for sample in range(samples)]
        try:
            for _ in tasks:
                outcome = await finished.get()
                if isinstance(outcome, _Raised):
                    raise outcome.error
                yield outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run(
        self, prompt: Prompt, key: EpisodeKey, sampling: Sampling | DiffusionSampling, seed: int
    ) -> Episode | EpisodeFailure:
        """A mistake of the user (`UserError`) stops the run; any other error of a loop fails its episode."""
        name = prompt.agent_loop or self.default_loop
        context = LoopContext(
            key, seed, sampling, self.tokenizer, self.max_prompt_tokens, self.send, str(prompt), self.context_tokens
        )
        try:
            if name not in self.loops:
                raise UserError(f"{prompt}: no agent loop is named {name!r}; there are {', '.join(sorted(self.loops))}")
            episode = await self.loops[name].run(prompt, context)
            _check(episode, name)
        except UserError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _cancelled():
                raise
            reason = f"agent loop {name!r} raised {type(error).__name__} on {prompt}: {error}"
            return EpisodeFailure(key, prompt, reason, traceback.format_exc())
        if all(trajectory.tokens.shape[0] <= self.context_tokens for trajectory in episode.trajectories):
            return episode
        return replace(episode, trajectories=tuple(_within(t, self.context_tokens) for t in episode.trajectories))


def _cancelled() -> bool:
    """Whether it is the episode that was cancelled, and not a task which its loop waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check(episode: Episode, name: str) -> None:
    """What a loop of the user's may get wrong, said before it reaches the queue."""
    if not episode.trajectories:
        raise ValueError(f"loop {name!r} returned an episode without trajectories")
    count = len(episode.trajectories)
    if not -count <= episode.reward_from < count:
        raise ValueError(f"reward_from is {episode.reward_from}, but the episode has {count} trajectories")
    for number, trajectory in enumerate(episode.trajectories):
        empty = trajectory.tokens.shape[0] == 0
        if not (empty and "sigmas" in trajectory.extra) and (empty or trajectory.prompt_length == 0):
            raise ValueError(f"trajectory {number}: the first token cannot be an action, nothing stands before it")


def _within(trajectory: Trajectory, length: int) -> Trajectory:
    """Without what an environment said after the last action and beyond the context: nobody answered it, so nothing is
    learnt from it, and teacher and learner need not have positions for it."""
    if trajectory.tokens.shape[0] <= length or bool(trajectory.mask[length:].any()):
        return trajectory
    along = {n for n in trajectory.extra if n in COLUMNS and COLUMNS[n].span == "sequence"}
    extra = {name: value[:length] if name in along else value for name, value in trajectory.extra.items()}
    return replace(trajectory, tokens=trajectory.tokens[:length], mask=trajectory.mask[:length], extra=extra)
