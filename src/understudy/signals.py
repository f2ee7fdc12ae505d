"""From the config's words to what judges and what learns: the algorithm, and the rewards."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from understudy.agent_loop.contract import derive_seed
from understudy.algorithms.contract import Algorithm, TeacherHead
from understudy.algorithms.distill import distill
from understudy.algorithms.grpo import grpo
from understudy.algorithms.objectives import OBJECTIVES, Settings
from understudy.algorithms.policy import PolicySettings
from understudy.algorithms.ppo import ppo, reinforce_plus_plus
from understudy.config.schema import Config, Distill, Grpo, Policy, Ppo, Reinforcement
from understudy.data.trajectory import Episode, Prompt
from understudy.errors import CannotJudge, UserError
from understudy.learning import Schedule
from understudy.rewards.contract import Answer, RewardSpec
from understudy.rewards.pool import RewardPool
from understudy.scoring import EpisodeJudge


def build_algorithm(config: Config, heads: Sequence[TeacherHead] = ()) -> Algorithm:
    """What the recipe names, ready to use; plugins must have been loaded."""
    chosen, policy = config.algorithm, policy_settings(config)
    if isinstance(chosen, Distill):
        _check_objective(chosen)
        return distill(
            objective=chosen.objective,
            payload=chosen.payload,
            form=chosen.form,
            top_k=chosen.top_k,
            settings=Settings(chosen.beta, chosen.alpha, chosen.log_prob_floor),
            discount=chosen.discount,
            normalise=chosen.normalise,
            policy=policy,
            task_weight=chosen.task_weight,
            heads=heads,
        )
    if isinstance(chosen, Grpo):
        return grpo(policy)
    in_reward = chosen.kl if chosen.kl_in == "reward" else 0.0
    if isinstance(chosen, Ppo):
        return ppo(
            policy,
            discount=chosen.discount,
            lam=chosen.gae_lambda,
            value_clip=chosen.value_clip,
            kl_in_reward=in_reward,
        )
    return reinforce_plus_plus(policy, discount=chosen.discount, kl_in_reward=in_reward)


def policy_settings(config: Config) -> PolicySettings:
    """The part of the algorithm's settings that every policy gradient has."""
    chosen: Policy = config.algorithm
    shared = PolicySettings(
        clip_low=chosen.clip_low,
        clip_high=chosen.clip_high,
        dual_clip=chosen.dual_clip,
        aggregation=chosen.aggregation,
        importance=chosen.importance,
        importance_cap=chosen.importance_cap,
        max_tokens=config.rollout.max_tokens,
        several_updates=chosen.epochs * chosen.minibatches > 1,
    )
    if isinstance(chosen, Distill | Grpo):
        shared = replace(shared, baseline=chosen.baseline, scale=chosen.scale)
    if isinstance(chosen, Reinforcement):
        kl = chosen.kl if chosen.kl_in == "loss" else 0.0
        shared = replace(shared, entropy=chosen.entropy, kl=kl, kl_estimator=chosen.kl_estimator)
    return shared


def schedule(config: Config, step: int) -> Schedule:
    """How often, and in which parts, the batch of a step is learned from."""
    chosen = config.algorithm
    return Schedule(
        chosen.epochs,
        chosen.minibatches,
        derive_seed(config.seed, "minibatches", step) % 2**31,
        actor=not isinstance(chosen, Ppo) or step > chosen.critic_warmup,
    )


def _check_objective(chosen: Distill) -> None:
    """A plugin's objective: it must be there, and its form must make sense."""
    if chosen.objective not in OBJECTIVES:
        near = difflib.get_close_matches(chosen.objective, OBJECTIVES, n=1)
        raise UserError(
            f"algorithm.objective: no objective is named {chosen.objective!r}"
            + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(OBJECTIVES)}")
        )
    sees = OBJECTIVES[chosen.objective].sees
    fits = {"token": ("auto", "sampled"), "top_k": ("auto", "top_k")}.get(sees)
    if (fits is not None and chosen.payload not in fits) or (sees == "distribution" and chosen.payload == "sampled"):
        raise UserError(f"algorithm.payload: {chosen.payload} does not serve {chosen.objective}, which sees the {sees}")
    if sees != "token" and chosen.form == "policy_gradient":
        raise UserError(f"algorithm.form: {chosen.objective} sees the {sees}, policy_gradient needs the token")


def reward_pool(config: Config) -> RewardPool | None:
    """The recipe's rewards in processes of their own; none if it names none."""
    if not config.rewards:
        return None
    specs = {
        name: RewardSpec(reward.function, reward.weight, reward.timeout, reward.options)
        for name, reward in config.rewards.items()
    }
    return RewardPool(specs, config.plugins)


def reward_judge(pool: RewardPool, names: Sequence[str], decode: Callable[[list[int]], str]) -> EpisodeJudge:
    """Rewards what the student wrote in the trajectory that counts, unless its loop gave a reward itself. `names`: of
    the run's rewards, in the order of column reward_parts."""

    async def judge(episode: Episode) -> dict[str, Tensor]:
        trajectory = episode.trajectories[episode.reward_from]
        if trajectory.reward is not None:
            nothing = torch.full((len(names),), float("nan"))
            return {"reward": torch.tensor(trajectory.reward, dtype=torch.float32), "reward_parts": nothing}
        text = decode(trajectory.tokens[trajectory.mask].tolist())
        prompt = episode.prompt
        judgement = await pool.score(
            Answer(prompt_text(prompt), text, prompt.ground_truth, dict(prompt.columns), trajectory.finish)
        )
        if judgement.reward is None:
            raise CannotJudge(f"{prompt}: {judgement.failure}")
        parts = torch.tensor([judgement.parts[name] for name in names], dtype=torch.float32)
        return {"reward": torch.tensor(judgement.reward, dtype=torch.float32), "reward_parts": parts}

    return judge


def part_means(parts: Tensor, names: Sequence[str]) -> dict[str, float]:
    """`reward_NAME` for each of several rewards, unweighted: one of weight 0 is a measure that is never trained on.
    `parts` [episodes, rewards]."""
    if len(names) < 2 or len(parts) == 0:
        return {}
    return {f"reward_{name}": float(value) for name, value in zip(names, parts.nanmean(0).tolist(), strict=True)}


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: its last user message."""
    if prompt.text is not None:
        return prompt.text
    users = [m.content for m in prompt.messages if m.role == "user"]
    return users[-1] if users else prompt.messages[-1].content
