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
from understudy.errors import CannotJudge, UserError
from understudy.queue.contract import SampleQueue

Judge = Callable[[Key, Prompt, Trajectory], Awaitable[dict[str, Tensor]]]
"""Columns that a teacher or a reference adds to one trajectory."""
EpisodeJudge = Callable[[Episode], Awaitable[dict[str, Tensor]]]
"""Row-span columns that a reward adds to every trajectory of an episode."""


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
    """Puts episodes into the queue and completes their rows. A judge that cannot judge fails the episode's group, with
    its reason; nothing is made up in its place."""

    queue: SampleQueue
    judges: tuple[Judge, ...]
    episode_judges: tuple[EpisodeJudge, ...] = ()

    async def __call__(self, episode: Episode, step: int) -> None:
        keys = [episode.key.trajectory(number) for number in range(len(episode.trajectories))]
        rows = list(zip(keys, episode.trajectories, strict=True))
        for key, row in rows:
            await self.queue.put(key, row.columns(), _tags(row, step))
        await self.queue.seal(episode.key, len(keys))
        work = [self._judge(judge, key, episode.prompt, row) for key, row in rows for judge in self.judges]
        work += [self._judge_episode(judge, episode, keys) for judge in self.episode_judges]
        try:
            if len(work) == 1:
                await work[0]  # the usual case, without a task of its own
                return
        except CannotJudge as error:
            await self.queue.fail(episode.key.group, str(error))
            return
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(outcome, CannotJudge):
                await self.queue.fail(episode.key.group, str(outcome))
            elif outcome is not None:
                raise outcome

    async def _judge(self, judge: Judge, key: Key, prompt: Prompt, trajectory: Trajectory) -> None:
        await self.queue.update(key, await judge(key, prompt, trajectory))

    async def _judge_episode(self, judge: EpisodeJudge, episode: Episode, keys: list[Key]) -> None:
        columns = await judge(episode)
        for key in keys:
            await self.queue.update(key, columns)


def _tags(trajectory: Trajectory, step: int) -> dict[str, int | float | str]:
    """What may be known of a row without its data."""
    return {
        "step": step,
        "finish": trajectory.finish,
        "tokens": len(trajectory.mask),
        "actions": len(trajectory.behaviour_logp),
    }
