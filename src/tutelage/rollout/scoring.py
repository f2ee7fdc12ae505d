"""Score finished episodes: put their rows into the queue, ask the judges, and add the results.

Every trajectory is scored separately, while other episodes are still being generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.data.trajectory import Episode, Key, Prompt, Trajectory
from tutelage.errors import CannotJudge, UserError
from tutelage.queue.constrained import CONSTRAINED
from tutelage.queue.contract import SampleQueue

Judge = Callable[[Key, Prompt, Trajectory], Awaitable[dict[str, Tensor]]]
"""Returns the columns that a teacher or the reference adds to one trajectory."""
EpisodeJudge = Callable[[Episode], Awaitable[dict[str, Tensor]]]
"""Returns the row-span columns that a reward adds to every trajectory of an episode."""
PutTask = asyncio.Task[None]
"""The task that puts the rows of an episode. Columns can be added when it is done."""


@asynccontextmanager
async def scoring_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group for scoring. A UserError is raised as it is, not inside an exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        mistakes = [error for error in group.exceptions if isinstance(error, UserError)]
        raise mistakes[0] if mistakes else group from None


@dataclass(frozen=True, slots=True)
class EpisodeScorer:
    """Puts episodes into the queue and completes their rows.

    If a judge raises CannotJudge, the group of the episode fails with its reason.
    """

    queue: SampleQueue
    judges: tuple[Judge, ...]
    episode_judges: tuple[EpisodeJudge, ...] = ()

    async def __call__(self, episode: Episode, step: int) -> None:
        keys = [episode.key.trajectory(number) for number in range(len(episode.trajectories))]
        rows = list(zip(keys, episode.trajectories, strict=True))
        given = episode.rewarded.reward
        stored = asyncio.create_task(self._store(rows, given, step))  # judges do not wait for the queue
        work = [self._judge(judge, key, episode.prompt, row, stored) for key, row in rows for judge in self.judges]
        work += [self._judge_episode(judge, episode, keys, stored) for judge in self.episode_judges]
        try:
            outcomes = [await _outcome(work[0])] if len(work) == 1 else await _outcomes(work)
            await stored
        finally:
            stored.cancel()
        for outcome in outcomes:
            if isinstance(outcome, CannotJudge):
                await self.queue.fail(episode.key.group, str(outcome))
            elif outcome is not None:
                raise outcome

    async def _store(self, rows: list[tuple[Key, Trajectory]], reward: float | None, step: int) -> None:
        """Put the rows of an episode. All of them get the reward that the loop set, if any."""
        given = {} if reward is None else {"reward": torch.tensor(reward, dtype=torch.float32)}
        for key, row in rows:
            await self.queue.put(key, {**row.columns(), **given}, _tags(row, step), of=len(rows))

    async def _judge(self, judge: Judge, key: Key, prompt: Prompt, trajectory: Trajectory, stored: PutTask) -> None:
        columns = await judge(key, prompt, trajectory)
        await stored
        await self.queue.update(key, columns)

    async def _judge_episode(self, judge: EpisodeJudge, episode: Episode, keys: list[Key], stored: PutTask) -> None:
        columns = await judge(episode)
        await stored
        for key in keys:
            await self.queue.update(key, columns)


async def _outcome(work: Coroutine[Any, Any, None]) -> Exception | None:
    """Await a single judge without a separate task, and return its error."""
    try:
        await work
    except Exception as error:
        return error
    return None


async def _outcomes(work: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
    return await asyncio.gather(*work, return_exceptions=True)


def _tags(trajectory: Trajectory, step: int) -> dict[str, int | float | str]:
    """Return the tags of a row, which can be read without its data."""
    constrained: dict[str, int | float | str] = {CONSTRAINED: 1} if trajectory.extra.get("constraints") else {}
    return {
        **constrained,
        "step": step,
        "finish": trajectory.finish,
        "tokens": trajectory.mask.shape[0],
        "actions": trajectory.behaviour_logp.shape[0],
    }
