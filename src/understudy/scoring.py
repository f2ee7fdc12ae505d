"""What happens when an episode ends: its rows enter the queue, judges are asked, and what they say is added.

Every trajectory is scored, each on its own, while other episodes are still being generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torch import Tensor

from understudy.data.trajectory import Episode, Key, Prompt, Trajectory
from understudy.queue.contract import SampleQueue

Judge = Callable[[Key, Prompt, Trajectory], Awaitable[dict[str, Tensor]]]
"""Columns that a teacher, a reward or a reference adds to one trajectory."""


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
