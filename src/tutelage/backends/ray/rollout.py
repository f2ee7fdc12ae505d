"""Rollout on a cluster: deals prompts to agent-loop workers and collects the outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tutelage.backends.ray.actors import Outcomes, RolloutActor
from tutelage.backends.ray.coordinator import Coordinator, call_coordinator
from tutelage.backends.ray.handles import ActorHandle
from tutelage.data.trajectory import GroupKey, Prompt
from tutelage.errors import ReplicaGone, UserError
from tutelage.rollout.runner import EpisodeDone, RolloutRequest
from tutelage.rollout.worker import EpisodeFailure


@dataclass(slots=True)
class RayRollout:
    """Deals prompts to agent-loop workers. The unfinished prompts of a worker that dies are dealt to the others."""

    workers: tuple[ActorHandle[RolloutActor], ...]
    coordinator: ActorHandle[Coordinator]
    reissued: int = 0
    """prompts that were dealt again because their worker died"""
    _number: int = 0

    async def run(
        self, order: RolloutRequest, prompts: Sequence[Prompt]
    ) -> AsyncIterator[EpisodeDone | EpisodeFailure]:
        outcomes = Outcomes()

        async def work() -> None:
            try:
                await self._all(order, prompts, outcomes)
            except BaseException as error:
                outcomes.put_nowait(error)
            else:
                outcomes.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            while (outcome := await outcomes.get()) is not None:
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _all(self, order: RolloutRequest, prompts: Sequence[Prompt], outcomes: Outcomes) -> None:
        """Run every prompt on the workers that are there."""
        left = list(prompts)
        while left:
            shares = [left[number :: len(self.workers)] for number in range(len(self.workers))]
            work = [self._share(w, order, s, outcomes) for w, s in zip(self.workers, shares, strict=True) if s]
            found = await asyncio.gather(*work)
            lost = [prompt for unfinished, _ in found for prompt in unfinished]
            gone = [error for _, error in found if error is not None]
            if lost and len(gone) == len(found) and all(error.for_good for error in gone):
                raise UserError(f"all agent-loop workers are gone: {gone[0]}")
            if lost and gone:
                await asyncio.sleep(0.2)
            self.reissued += len(lost)
            left, order = lost, order.again()

    async def _share(
        self, worker: ActorHandle[RolloutActor], order: RolloutRequest, prompts: list[Prompt], outcomes: Outcomes
    ) -> tuple[list[Prompt], ReplicaGone | None]:
        """Run prompts on one worker. Return those that it did not finish, and why."""
        self._number += 1
        number = self._number
        finished: Counter[GroupKey] = Counter()
        try:
            await worker.call(RolloutActor.start, number, order, prompts)
            running = True
            while running:
                report = await worker.call(RolloutActor.report, number)
                for outcome in report.outcomes:
                    finished[outcome.key.group] += 1
                    outcomes.put_nowait(outcome)
                if report.user_error is not None:
                    raise report.user_error
                if report.error is not None:
                    raise RuntimeError(f"{worker.name}: {report.error}")
                running = not report.finished
        except ReplicaGone as error:
            if error.for_good:
                await call_coordinator(self.coordinator, Coordinator.disconnect, worker.name)
            return [p for p in prompts if finished[GroupKey(order.partition, p.uid)] < order.samples], error
        return [], None
