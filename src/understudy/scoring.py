"""What happens when an episode ends: its rows enter the queue, judges are asked, and what they say is added.

Every trajectory is scored, each on its own, while other episodes are still being generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from understudy.data.trajectory import Episode, Key, Prompt, Trajectory
from understudy.errors import UserError
from understudy.queue.contract import SampleQueue

Judge = Callable[[Key, Prompt, Trajectory], Awaitable[dict[str, Tensor]]]
"""Columns that a teacher, a reward or a reference adds to one trajectory."""


@asynccontextmanager
async def scoring_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that score episodes, all done at the end. A mistake of the user's comes out as itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        mistakes = [error for error in group.exceptions if isinstance(error, UserError)]
        raise mistakes[0] if mistakes else group from None


@dataclass(frozen=True, slots=True)
class EpisodeScorer:
    """Puts episodes into the queue and completes their rows."""

    queue: SampleQueue
    judges: tuple[Judge, ...]

    async def __call__(self, episode: Episode, step: int) -> None:
        keys = [episode.key.trajectory(number) for number in range(len(episode.trajectories))]
        for key, trajectory in zip(keys, episode.trajectories, strict=True):
            tags: dict[str, int | float | str] = {"step": step, "finish": trajectory.finish}
            await self.queue.put(key, trajectory.columns(), tags)
        await self.queue.seal(episode.key, len(keys))
        await asyncio.gather(
            *(
                self._judge(judge, key, episode.prompt, trajectory)
                for key, trajectory in zip(keys, episode.trajectories, strict=True)
                for judge in self.judges
            )
        )

    async def _judge(self, judge: Judge, key: Key, prompt: Prompt, trajectory: Trajectory) -> None:
        await self.queue.update(key, await judge(key, prompt, trajectory))
