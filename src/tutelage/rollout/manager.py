"""Deals prompts to workers, has each episode finished as soon as it ends, and streams what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tutelage.data.trajectory import Episode, EpisodeKey, Prompt
from tutelage.engines.contract import DiffusionSampling, Sampling
from tutelage.rollout.worker import AgentLoopWorker, EpisodeFailure

Outcome = TypeVar("Outcome")
Seed = Callable[[Prompt, int], int]
"""(prompt, sample) → seed of the episode"""


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


@dataclass(frozen=True, slots=True)
class RolloutManager:
    """Episodes of many prompts over several workers."""

    workers: Sequence[AgentLoopWorker]

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
        """Run every prompt `samples` times; `finish` each episode when it ends, while others run, and yield what comes
        of it. The first error ends them all. All samples of a prompt go to one worker (so that it can share their
        prefix); prompts need not divide evenly among workers."""
        finished: asyncio.Queue[Outcome | _Raised] = asyncio.Queue()

        async def one(worker: AgentLoopWorker, prompt: Prompt, sample: int) -> None:
            key = EpisodeKey(partition, prompt.uid, sample, attempt)
            try:
                finished.put_nowait(await finish(await worker.run(prompt, key, sampling, seed(prompt, sample))))
            except Exception as error:
                finished.put_nowait(_Raised(error))

        tasks = [
            asyncio.create_task(one(self.workers[number % len(self.workers)], prompt, sample))
            for number, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
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
