"""Subjects that learn from rewards, and whether each has the gradient of the expected reward.

Rewards are a random table over all sequences. Groups have two episodes, so that every pair can be enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tutelage.algorithms.contract import Algorithm, Signal, TeacherHead
from tutelage.certify import textbook
from tutelage.certify.scene import View
from tutelage.certify.subjects import LONGEST, SETTINGS, Build, Subject, builder, choices
from tutelage.certify.textbook import PerAction, Scalar
from tutelage.config import schema
from tutelage.data.trajectory import Batch

GROUP = 2
KL = 0.5
"""Coefficient of the KL to the reference, of the entropy bonus and of task rewards. It is not 1, so that a missing
coefficient is detected."""
LAMBDA = 0.95


def reinforcement() -> list[Subject]:
    """Return all subjects without a teacher, and those that combine a teacher with rewards."""
    return [*_grpo(), *_reference(), _entropy(), _tasks(), _normalised(), *_reinforce(), *_ppo(), _critic()]


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _grpo() -> list[Subject]:
    plain = [
        _group_row(baseline, scale, "token_mean")
        for scale in choices(schema.Grpo, "scale")
        for baseline in choices(schema.Grpo, "baseline")
    ]
    others = [mode for mode in choices(schema.Grpo, "aggregation") if mode != "token_mean"]
    return [*plain, *(_group_row("mean", "none", mode) for mode in others)]


def _group_row(baseline: str, scale: str, aggregation: str) -> Subject:
    mean = {"token_mean": textbook.token_mean, "sequence_mean": textbook.sequence_mean}.get(
        aggregation, textbook.sequence_sum(LONGEST)
    )
    factor = 1 - 1 / GROUP if baseline == "mean" else 1.0
    note = "the gradient of the expected reward"
    if baseline == "mean":
        note += f", times 1 − 1/n: a reward is part of its own baseline (n = {GROUP})"
    if scale != "none":
        note = f"divided by the {scale.replace('_', ' ')}, which depends on the samples: groups have different weights"

    def aim(seen: View) -> Tensor:
        longest = LONGEST if aggregation == "sequence_sum" else int(seen.lengths[0])
        return factor * textbook.negative_reward(seen) * seen.lengths[0] / longest

    return Subject(
        objective="grpo",
        payload="rewards",
        form=f"{baseline}, {scale}" + ("" if aggregation == "token_mean" else f", {aggregation}"),
        target="sequence",
        exact=scale == "none",
        note=note,
        build=builder(name="grpo", baseline=baseline, scale=scale, aggregation=aggregation),
        plain=mean(_group_losses(baseline, scale)),
        aim=aim,
        samples=GROUP,
        agrees="rewards" if baseline != "none" else None,
    )


def _group_losses(baseline: str, scale: str) -> PerAction:
    def losses(seen: View) -> Tensor:
        advantage = textbook.group_advantages(seen, baseline, scale)
        return textbook.clipped(seen.taken(seen.student), seen.behaviour, advantage)

    return losses


def _tasks() -> Subject:
    """Distillation with task rewards."""
    divergence = textbook.divergence("reverse_kl", SETTINGS)
    tasks = _group_losses("leave_one_out", "none")
    return Subject(
        objective="reverse_kl",
        payload="full",
        form="supervised, task rewards",
        target="token",
        exact=True,
        note=f"reverse KL at visited states minus {KL:g} times the expected reward",
        build=builder(objective="reverse_kl", task_weight=KL, baseline="leave_one_out", scale="none"),
        plain=textbook.token_mean(lambda seen: divergence(seen) + KL * tasks(seen)),
        aim=textbook.combined((1.0, textbook.at_states(divergence)), (KL, textbook.negative_reward)),
        samples=GROUP,
    )


def _normalised() -> Subject:
    """Distillation with whitened advantages. Whitening amplifies small differences, so the gradient does not vanish
    close to the teacher."""

    def losses(seen: View) -> Tensor:
        own = seen.behaviour - seen.taken(seen.teacher)
        return textbook.clipped(seen.taken(seen.student), seen.behaviour, textbook.white(-own))

    return Subject(
        objective="k1",
        payload="sampled",
        form="policy_gradient, normalise",
        discount=0,
        target="token",
        exact=False,
        note="k1 whitened: the mean and standard deviation depend on the samples",
        build=builder(objective="k1", form="policy_gradient", normalise=True),
        plain=textbook.token_mean(losses),
        aim=textbook.at_states(textbook.divergence("reverse_kl", SETTINGS)),
        other=textbook.of_sequences("reverse_kl", SETTINGS),
        samples=GROUP,
    )


# ── additional terms ─────────────────────────────────────────────────────────────────────────────────────────────────


def toward_reference(scalar: Scalar) -> Scalar:
    return lambda seen: scalar(replace(seen, teacher=seen.reference))


def _reference() -> list[Subject]:
    """The KL to the reference in the loss. A group of one has no advantage, so the KL is the only term."""
    claims = {"k2": "reverse_kl", "k3": "forward_kl", "k3_straight_through": "reverse_kl"}
    return [
        _reference_row(estimator, claims.get(estimator, "reverse_kl"))
        for estimator in choices(schema.Grpo, "kl_estimator")
    ]


def _reference_row(estimator: str, claim: str) -> Subject:
    values = "k3" if estimator == "k3_straight_through" else estimator
    rewarded = _group_losses("mean", "none")

    def losses(seen: View) -> Tensor:
        own, theirs = seen.taken(seen.student), seen.taken(seen.reference)
        pull = textbook.ESTIMATES["k2" if estimator == "k3_straight_through" else values](own, theirs, SETTINGS)
        return rewarded(seen) + KL * pull

    return Subject(
        objective="reference_kl",
        payload="reference",
        form=f"loss, {estimator}",
        target="token",
        exact=True,
        note="the gradient of KL" + ("(student‖reference)" if claim == "reverse_kl" else "(reference‖student)"),
        build=builder(name="grpo", kl=KL, kl_estimator=estimator, scale="none"),
        plain=textbook.token_mean(losses),
        aim=textbook.combined(
            (KL, toward_reference(textbook.at_states(textbook.divergence(claim, SETTINGS)))),
        ),
        other=textbook.combined((KL, toward_reference(textbook.of_sequences(claim, SETTINGS)))),
        agrees="reference",
        smooth=estimator != "k3_straight_through",
    )


def _entropy() -> Subject:
    rewarded = _group_losses("mean", "none")

    def negative_entropy(seen: View) -> Tensor:
        return (seen.student.exp() * seen.student).sum(-1)

    return Subject(
        objective="entropy",
        payload="none",
        form="loss",
        target="token",
        exact=True,
        note="the gradient of the entropy at visited states",
        build=builder(name="grpo", entropy=KL, scale="none"),
        plain=textbook.token_mean(lambda seen: rewarded(seen) + KL * negative_entropy(seen)),
        aim=textbook.combined((KL, textbook.at_states(negative_entropy))),
        other=textbook.combined((KL, textbook.through_states(negative_entropy))),
    )


# ── returns and critics ──────────────────────────────────────────────────────────────────────────────────────────────


def _per_action(seen: View, kl: float) -> Tensor:
    return textbook.final_reward(seen) - kl * (seen.behaviour - seen.taken(seen.reference))


def _returns_losses(kl: float) -> PerAction:
    def losses(seen: View) -> Tensor:
        own, rows = _per_action(seen, kl).tolist(), seen.row.tolist()
        returns = [sum(own[u] for u in range(t, len(own)) if rows[u] == rows[t]) for t in range(len(own))]
        advantage = textbook.white(seen.rewards.new_tensor(returns))
        return textbook.clipped(seen.taken(seen.student), seen.behaviour, advantage)

    return losses


def _reward_and_kl(kl: float) -> Scalar:
    sequences = toward_reference(textbook.of_sequences("reverse_kl", SETTINGS))
    return textbook.combined((1.0, textbook.negative_reward), (kl, sequences))


def _reinforce() -> list[Subject]:
    return [
        Subject(
            objective="reinforce_plus_plus",
            payload="rewards",
            form="whitened" + (", kl in the reward" if kl else ""),
            target="sequence",
            exact=False,
            note="returns are whitened by the standard deviation of the batch",
            build=builder(name="reinforce_plus_plus", kl=kl, kl_in="reward"),
            plain=textbook.token_mean(_returns_losses(kl)),
            aim=_reward_and_kl(kl),
            samples=GROUP,
            agrees="rewards" if kl == 0 else None,
        )
        for kl in (0.0, KL)
    ]


def _ppo() -> list[Subject]:
    bare = "before whitening"
    return [
        _ppo_row(1.0, 0.0, whitened=False, exact=True, note=f"{bare}: any critic is an unbiased baseline"),
        _ppo_row(1.0, KL, whitened=False, exact=True, note=f"{bare}: the expected reward minus KL(student‖reference)"),
        _ppo_row(LAMBDA, 0.0, whitened=False, exact=False, note=f"{bare}: below 1, the critic's errors cause a bias"),
        _ppo_row(LAMBDA, 0.0, whitened=True, exact=False, note="as in a run: whitened over the batch"),
    ]


def _ppo_row(lam: float, kl: float, *, whitened: bool, exact: bool, note: str) -> Subject:
    def losses(seen: View) -> Tensor:
        advantage = textbook.general_advantages(seen, _per_action(seen, kl), lam)
        advantage = textbook.white(advantage) if whitened else advantage
        return textbook.clipped(seen.taken(seen.student), seen.behaviour, advantage)

    words: dict[str, Any] = {"name": "ppo", "gae_lambda": lam, "kl": kl, "kl_in": "reward"}
    form = f"lambda {lam:g}" + (", kl in the reward" if kl else "") + (", whitened" if whitened else "")
    return Subject(
        objective="ppo",
        payload="rewards",
        form=form,
        target="sequence",
        exact=exact,
        note=note,
        build=builder(**words) if whitened else before_whitening(builder(**words)),
        plain=textbook.token_mean(losses),
        aim=_reward_and_kl(kl),
        samples=GROUP if whitened else 1,
    )


def before_whitening(build: Build) -> Build:
    """Return the same algorithm with the advantages of GAE before whitening, computed as returns minus values."""

    def bare(heads: Sequence[TeacherHead]) -> Algorithm:
        algorithm = build(heads)
        whitened = algorithm.over_columns
        assert whitened is not None

        def over_columns(batch: Batch) -> Signal:
            signal = whitened(batch)
            returns, values = signal.columns["returns"], batch.columns["values"]
            advantage = returns.map(lambda flat: flat - values.values)
            return replace(signal, columns={**signal.columns, "advantage": advantage})

        return replace(algorithm, over_columns=over_columns)

    return bare


def _critic() -> Subject:
    """The critic's loss: half the squared distance to the return, at visited states."""

    def losses(seen: View) -> Tensor:
        advantage = textbook.general_advantages(seen, textbook.final_reward(seen), 1.0)
        return (seen.values - (advantage + seen.values).detach()) ** 2 / 2

    def expected(seen: View) -> Tensor:
        return (seen.values - seen.rewards[seen.row]) ** 2 / 2

    return Subject(
        objective="ppo",
        payload="rewards",
        form="critic, lambda 1",
        target="token",
        exact=True,
        note="half the squared distance between value and return, at visited states",
        build=builder(name="ppo", gae_lambda=1.0),
        plain=textbook.token_mean(losses),
        aim=textbook.at_states(expected),
        critic=True,
    )
