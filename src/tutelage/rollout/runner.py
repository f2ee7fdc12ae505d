"""Run prompts to complete rows: agent loops run, and each episode is scored as soon as it ends.

The same class serves a run in one process and, on Ray, every agent-loop worker for its share of the prompts. Results
describe how an episode went; its tensors go to the queue only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Episode, EpisodeKey, Prompt
from tutelage.engines.contract import DiffusionSampling, Sampling, Want
from tutelage.rollout.scoring import EpisodeScorer
from tutelage.rollout.worker import AgentLoopWorker, EpisodeFailure


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The settings that all episodes of a step, or of an evaluation, share."""

    partition: str
    samples: int
    sampling: Sampling | DiffusionSampling
    want: Want
    """what teachers are asked for"""
    seed: int
    """the seed of the run"""
    step: int = -1
    version: int = 0
    """version of the weights that generate the episodes"""
    attempt: int = 0
    """above 0 if the prompts are run again; the results supersede those of earlier attempts"""

    @property
    def training(self) -> bool:
        return self.partition == "train"

    def seed_of(self, prompt: Prompt, sample: int) -> int:
        """Return the seed of an episode. A held-out row has the same seed in every evaluation, wherever its file is; in
        training, every draw of a row has its own."""
        which = prompt.uid if self.training else prompt.row
        return derive_seed(self.seed, self.partition, which, sample)

    def again(self) -> RolloutRequest:
        return replace(self, attempt=self.attempt + 1)


@dataclass(frozen=True, slots=True)
class EpisodeDone:
    """An episode whose rows are complete, or whose group failed during scoring, as recorded in the queue."""

    key: EpisodeKey
    timings: dict[str, float]
    actions: int
    mass_cut: float
    """mean over its actions"""

    @classmethod
    def of(cls, episode: Episode) -> EpisodeDone:
        counts = [(t.behaviour_logp.shape[0], t.metrics.get("mass_cut", 0.0)) for t in episode.trajectories]
        actions = sum(count for count, _ in counts)
        cut = sum(count * mass for count, mass in counts) / max(actions, 1)
        return cls(episode.key, dict(episode.timings), actions, cut)


class Rollouts(Protocol):
    """Runs prompts, in this process or in others. Their groups must be open."""

    def run(self, order: RolloutRequest, prompts: Sequence[Prompt]) -> AsyncIterator[EpisodeDone | EpisodeFailure]:
        """Yield outcomes as episodes end. Their rows are in the queue, where failed groups are marked."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Runs loops and scoring in this process."""

    worker: AgentLoopWorker
    scorer: Callable[[Want, bool], EpisodeScorer]
    """returns the scorer for a request to teachers; the second argument is True in training"""

    async def run(
        self, order: RolloutRequest, prompts: Sequence[Prompt]
    ) -> AsyncIterator[EpisodeDone | EpisodeFailure]:
        scorer = self.scorer(order.want, order.training)

        async def finish(outcome: Episode | EpisodeFailure) -> EpisodeDone | EpisodeFailure:
            if isinstance(outcome, Episode) and order.training and (found := _versions(outcome)) - {order.version}:
                reason = f"{outcome.prompt}: written with weights {sorted(found)}, the step is at {order.version}"
                outcome = EpisodeFailure(outcome.key, outcome.prompt, reason, "")
            if isinstance(outcome, EpisodeFailure):
                await scorer.queue.fail(outcome.key.group, outcome.reason)
                return outcome
            await scorer(outcome, order.step)
            return EpisodeDone.of(outcome)

        outcomes = self.worker.stream(
            order.partition, prompts, order.samples, order.sampling, order.seed_of, finish, order.attempt
        )
        async with aclosing(outcomes):
            async for outcome in outcomes:
                yield outcome


def _versions(episode: Episode) -> set[int]:
    """Return the weight versions of its actions."""
    return {version for trajectory in episode.trajectories for version in trajectory.version.tolist()}


@dataclass(slots=True)
class EpisodeTimes:
    """Timings of a step's episodes: mean, p95 and maximum of the total, and the breakdown of the slowest."""

    episodes: list[EpisodeDone] = field(default_factory=list)

    def add(self, episode: EpisodeDone) -> None:
        self.episodes.append(episode)

    def metrics(self) -> dict[str, float]:
        if not self.episodes:
            return {}
        totals = sorted(e.timings.get("total", 0.0) for e in self.episodes)
        slowest = max(self.episodes, key=lambda e: e.timings.get("total", 0.0))
        p95 = totals[-(-95 * len(totals) // 100) - 1]
        breakdown = {f"episode_slowest_{name}": seconds for name, seconds in slowest.timings.items() if name != "total"}
        return {
            "episode_mean": sum(totals) / len(totals),
            "episode_p95": p95,
            "episode_max": totals[-1],
            **breakdown,
            "mass_cut": self._mass_cut(),
        }

    def _mass_cut(self) -> float:
        """Return the mean over actions of the probability that could not be drawn: outside top-p and top-k, or a stop
        before min_tokens."""
        actions = sum(episode.actions for episode in self.episodes)
        return sum(episode.mass_cut * episode.actions for episode in self.episodes) / max(actions, 1)
