"""The judges of finished episodes: teachers, the reference and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.measures import reward_measure
from tutelage.config.schema import RunConfig
from tutelage.data.trajectory import Episode, Key, Prompt, Trajectory
from tutelage.engines.contract import ScoreRequest, Want
from tutelage.errors import CannotJudge
from tutelage.isolation.handover import is_handed, pickled
from tutelage.queue.contract import SampleQueue
from tutelage.rewards.contract import REWARDS, Answer, Media, RewardSpec
from tutelage.rewards.processes.pool import RewardPool
from tutelage.rollout.scoring import EpisodeJudge, EpisodeScorer, Judge
from tutelage.teachers.client import TeacherClient, constraints_of, runs
from tutelage.teachers.pool import Scorer


def reward_pool(config: RunConfig) -> RewardPool | None:
    """Build the pool of worker processes for the recipe's rewards; None if it has no rewards."""
    if not config.rewards:
        return None
    specs = {
        name: RewardSpec(**{**dict(reward), "options": _with_toys(reward.options)})
        for name, reward in config.rewards.items()
    }
    given = {spec.function: REWARDS[spec.function] for spec in specs.values() if spec.function in REWARDS}
    functions = pickled({name: reward for name, reward in given.items() if is_handed(reward)}, "rewards")
    return RewardPool(specs, config.plugins, functions=functions, seed=config.seed)


def _with_toys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `toy:` names by the directories of these toys."""
    toys = {name: value for name, value in options.items() if isinstance(value, str) and value.startswith("toy:")}
    if not toys:
        return dict(options)
    import tutelage.toys  # noqa: F401  enters the makers of toy:NAME
    from tutelage.models.flow.sources import pipeline_directory

    return {**options, **{name: str(pipeline_directory(value, lambda line: None)) for name, value in toys.items()}}


RewardInput = Callable[[Trajectory], tuple[str, Media | None]]
"""Returns what rewards see of a trajectory: its text, or its image or video."""


def reward_judge(pool: RewardPool, names: Sequence[str], reward_input: RewardInput) -> EpisodeJudge:
    """Return a judge that scores the rewarded trajectory of an episode, unless its loop has set a reward.

    `names` are the names of the run's rewards, in the order of column reward_parts.
    """

    async def judge(episode: Episode) -> dict[str, Tensor]:
        trajectory = episode.rewarded
        if trajectory.reward is not None:
            nothing = torch.full((len(names),), float("nan"))
            return {"reward": torch.tensor(trajectory.reward, dtype=torch.float32), "reward_parts": nothing}
        prompt, (text, media) = episode.prompt, reward_input(trajectory)
        judgement = await pool.score(
            Answer(prompt.request, text, prompt.ground_truth, dict(prompt.columns), trajectory.finish, media)
        )
        if judgement.reward is None:
            raise CannotJudge(f"{prompt}: {judgement.failure}")
        parts = torch.tensor([judgement.parts[name] for name in names], dtype=torch.float32)
        return {"reward": torch.tensor(judgement.reward, dtype=torch.float32), "reward_parts": parts}

    return judge


def part_means(parts: Tensor, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the unweighted mean of each reward, if there are several, as `reward_NAME`.

    A reward of weight 0, which is not trained on, is a measure called NAME. `parts` is [episodes, rewards].
    """
    if len(weights) < 2 or len(parts) == 0:
        return {}
    named = [reward_measure(name, weight) for name, weight in weights.items()]
    return dict(zip(named, parts.nanmean(0).tolist(), strict=True))


def reward_weights(config: RunConfig) -> dict[str, float]:
    return {name: reward.weight for name, reward in config.rewards.items()}


@dataclass(frozen=True, slots=True)
class Judges:
    """The judges of a run: teachers, the reference and rewards."""

    config: RunConfig
    reward_input: RewardInput
    queue: SampleQueue
    teachers: TeacherClient
    reference: Scorer | None
    rewards: RewardPool | None

    def __call__(self, want: Want, training: bool) -> EpisodeScorer:
        """Return a scorer with the judges that the algorithm or the evaluation needs."""
        found: list[Judge] = []
        if self.teachers.teachers and want != Want():
            found.append(lambda key, prompt, row: self.teachers.score(key, prompt, row, want))
        if training and self.reference is not None:
            found.append(_reference_judge(self.reference))
        if self.rewards is None:
            return EpisodeScorer(self.queue, tuple(found))
        judge = reward_judge(self.rewards, tuple(self.config.rewards), self.reward_input)
        return EpisodeScorer(self.queue, tuple(found), (judge,))


def _reference_judge(engine: Scorer) -> Judge:
    async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        tokens, spans, want = trajectory.tokens, tuple(runs(trajectory.mask)), Want(sampled=True)
        inside = constraints_of(trajectory, len(tokens))
        request = ScoreRequest(key, tokens, spans, want, "reference", constraints=inside)
        scores = await engine.score(request)
        assert scores.logp is not None
        return {"reference_logp": scores.logp}

    return judge
