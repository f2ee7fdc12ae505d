"""Deals prompts to workers and streams episodes as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from understudy.agent_loop.worker import AgentLoopWorker, EpisodeFailure
from understudy.data.trajectory import Episode, EpisodeKey, Prompt
from understudy.engines.contract import Painting, Sampling

Seed = Callable[[Prompt, int], int]
"""(prompt, sample) → seed of the episode"""


@dataclass(frozen=True, slots=True)
class RolloutManager:
    """Episodes of many prompts over several workers."""

    workers: Sequence[AgentLoopWorker]

    async def stream(
        self,
        partition: str,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling | Painting,
        seed: Seed,
        attempt: int = 0,
    ) -> AsyncIterator[Episode | EpisodeFailure]:
        """Run every prompt `samples` times; yield each episode when it ends. All samples of a prompt go to one worker
        (so that it can share their prefix); prompts need not divide evenly among workers."""
        finished: asyncio.Queue[Episode | EpisodeFailure | BaseException] = asyncio.Queue()

        async def one(worker: AgentLoopWorker, prompt: Prompt, sample: int) -> None:
            key = EpisodeKey(partition, prompt.uid, sample, attempt)
            try:
                finished.put_nowait(await worker.run(prompt, key, sampling, seed(prompt, sample)))
            except Exception as error:
                finished.put_nowait(error)

        tasks = [
            asyncio.create_task(one(self.workers[number % len(self.workers)], prompt, sample))
            for number, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        try:
            for _ in tasks:
                outcome = await finished.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
