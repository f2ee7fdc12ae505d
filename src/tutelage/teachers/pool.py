"""Resident teachers: replicas that stay loaded from construction to shutdown and only score."""

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
        """Score a ScoreRequest (text) or a StepScoreRequest (denoising steps), depending on the teacher."""


class TeacherPool:
    """The replicas of one teacher behind a router. They stay loaded as long as the pool exists."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Scorer],
        balancer: LoadBalancer | None = None,
        deadline: float | None = None,
    ) -> None:
        """`balancer` and `deadline` are passed to the `Router`."""
        self.name = name
        self.router = Router(f"teacher {name!r}", replicas, balancer, deadline)

    async def score(self, request: AnyScoreRequest) -> Scores:
        """Score a request on one replica. If it fails, the request goes to the others."""

        async def ask(replica: Scorer) -> Scores:
            if request.deadline is None:
                return await replica.score(request)
            return await asyncio.wait_for(replica.score(request), request.deadline)

        return await self.router.call(tuple(request.key.group), ask)
