"""Resident teachers: replicas that live from construction to shutdown and do nothing but score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tutelage.engines.contract import AnyScoreRequest, Scores
from tutelage.routing.load_balancer import LoadBalancer
from tutelage.routing.router import Router


class Scorer(Protocol):
    """The part of the engine contract that a teacher uses."""

    async def score(self, request: AnyScoreRequest) -> Scores:
        """A ScoreRequest of text, or a StepScoreRequest of denoising steps: whichever it was made for."""


class TeacherPool:
    """The replicas of one teacher behind a router. No sleep, no wake: they are up as long as the pool is."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Scorer],
        balancer: LoadBalancer | None = None,
        deadline: float | None = None,
    ) -> None:
        """`balancer` and `deadline` are those of the `Router`."""
        self.name = name
        self.router = Router(f"teacher {name!r}", replicas, balancer, deadline)

    async def score(self, request: AnyScoreRequest) -> Scores:
        """Answered by one replica; a failing one's requests go to the others."""

        async def ask(replica: Scorer) -> Scores:
            if request.deadline is None:
                return await replica.score(request)
            return await asyncio.wait_for(replica.score(request), request.deadline)

        return await self.router.call(tuple(request.key.group), ask)
