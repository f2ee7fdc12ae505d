"""Build the algorithm of a text run from its config."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.algorithms.distill import distill
from tutelage.algorithms.grpo import grpo
from tutelage.algorithms.objectives import OBJECTIVES, Settings
from tutelage.algorithms.policy import PolicySettings
from tutelage.algorithms.ppo import ppo, reinforce_plus_plus
from tutelage.config.objectives import SERVES
from tutelage.config.schema import Config, Distill, Grpo, Policy, Ppo, Reinforcement
from tutelage.errors import UserError


def build_algorithm(config: Config, heads: Sequence[TeacherHead] = ()) -> Algorithm:
    """Build the algorithm that the recipe names. Plugins must already be loaded."""
    chosen, policy = config.algorithm, policy_settings(config)
    if isinstance(chosen, Distill):
        _check_objective(chosen)
        algorithm = distill(
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
        return replace(algorithm, note=algorithm.note + _temperatures(config))
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


def _temperatures(config: Config) -> str:
    """Return a remark for the run's first line if student and teacher are compared at different temperatures."""
    student = config.student_temperature
    others = {name: config.teacher_temperature(name) for name in config.teachers}
    others = {name: temperature for name, temperature in others.items() if temperature != student}
    if not others:
        return ""
    listed = ", ".join(f"teacher {name} at {temperature:g}" for name, temperature in others.items())
    return (
        f"; temperatures differ: the student is taken at {student:g} (rollout.temperature), {listed}, so a student "
        "that equals its teacher still moves; "
        f"teachers.{next(iter(others))}.temperature: match takes both at {student:g}"
    )


def policy_settings(config: Config) -> PolicySettings:
    """Return the settings that all policy gradients share."""
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


def _check_objective(chosen: Distill) -> None:
    """Check that the objective is registered, and that payload and form fit it."""
    if chosen.objective not in OBJECTIVES:
        near = difflib.get_close_matches(chosen.objective, OBJECTIVES, n=1)
        raise UserError(
            f"algorithm.objective: no objective is named {chosen.objective!r}"
            + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(OBJECTIVES)}")
        )
    sees = OBJECTIVES[chosen.objective].sees
    if chosen.payload not in ("auto", *SERVES[sees]):
        raise UserError(f"algorithm.payload: {chosen.payload} does not serve {chosen.objective}, which sees the {sees}")
    if sees != "token" and chosen.form == "policy_gradient":
        raise UserError(f"algorithm.form: {chosen.objective} sees the {sees}, policy_gradient needs the token")
