"""Run episodes of all loops and modalities concurrently, and turn errors into failed episodes."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tutelage.data.trajectory import Episode, EpisodeKey, Prompt
from tutelage.engines.contract import DiffusionSampling, Sampling
from tutelage.errors import UserError
from tutelage.rollout.contract import AgentLoop, EpisodeKind

Outcome = TypeVar("Outcome")
Seed = Callable[[Prompt, int], int]
"""(prompt, sample) → seed of the episode"""


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An episode that failed, usually because its loop raised."""

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
    """Runs episodes, all that are requested at the same time."""

    loops: Mapping[str, AgentLoop]
    default_loop: str
    kind: EpisodeKind

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
        """Run every prompt `samples` times, call `finish` on each episode when it ends, and yield the result.

        The first error cancels all episodes.
        """
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
        """Run one episode. A UserError stops the run; any other error of the loop fails the episode."""
        name = prompt.agent_loop or self.default_loop
        context = self.kind.context(key, seed, sampling, str(prompt))
        try:
            if name not in self.loops:
                raise UserError(f"{prompt}: no agent loop is named {name!r}; there are {', '.join(sorted(self.loops))}")
            episode = await self.loops[name].run(prompt, context)
            _check(episode, name)
            return self.kind.finished(episode)
        except UserError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _cancelled():
                raise
            reason = f"agent loop {name!r} raised {type(error).__name__} on {prompt}: {error}"
            return EpisodeFailure(key, prompt, reason, traceback.format_exc())


def _cancelled() -> bool:
    """Whether the episode itself was cancelled, rather than a task that its loop waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check(episode: Episode, name: str) -> None:
    """Check the episode of a user's loop before it reaches the queue."""
    if not episode.trajectories:
        raise ValueError(f"loop {name!r} returned an episode without trajectories")
    count = len(episode.trajectories)
    if not -count <= episode.reward_from < count:
        raise ValueError(f"reward_from is {episode.reward_from}, but the episode has {count} trajectories")
