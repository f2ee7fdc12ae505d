"""Subjects with several updates per batch (`epochs`, `minibatches`) or a sampler that differs from the learner
(`importance`).

The sampler, the student before the updates and the trained student are three different toys here. Expectations are over
the sampled sequences with weights that do not depend on them, which holds for mini-batches that have not been trained
on yet. In a second epoch the weights depend on the same tokens, which no per-token weight can correct.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tutelage.algorithms.objectives import Objective
from tutelage.certify import textbook
from tutelage.certify.reinforcement import GROUP, KL, before_whitening, toward_reference
from tutelage.certify.scene import View
from tutelage.certify.subjects import SETTINGS, Subject, builder, choices, scheduled
from tutelage.certify.textbook import PerAction
from tutelage.config import schema

AGAIN: dict[str, Any] = {"epochs": 2, "minibatches": 2}
LATER = "second update"
APART = "sampler apart"
OPEN: dict[str, Any] = {"clip_low": 1 - 1e-9, "clip_high": 1e9, "dual_clip": None}
"""A range that clips nothing here, which leaves PPO's surrogate."""
UNCUT, CAP = 1e6, 1.1
"""Caps of the importance ratio: one that no ratio reaches, and one that many exceed."""
UNCOMPARED: dict[str, Any] = {"baseline": "none", "scale": "none"}
"""Settings for rewards without comparison, so that a batch may be a single row."""


def reuse() -> list[Subject]:
    """Return the subjects that do not belong to a single objective."""
    return [
        *_references(),
        *_rewards(),
        _critics(),
        _returns(),
        _as_advantage(),
        _whole_distribution(),
    ]


def _importance(seen: View, mode: str, cap: float) -> Tensor:
    """Return the importance weights [actions] from the sampler to the weights before the updates."""
    ratio = (seen.taken(seen.before) - seen.behaviour).exp()
    if mode == "truncate":
        return ratio.clamp(max=cap)
    if mode == "mask":
        return ratio * ((ratio <= cap) & (ratio >= 1 / cap))
    return ratio * 0 + 1


def _weight(seen: View, mode: str = "off", cap: float = UNCUT) -> Tensor:
    """Return the weights [actions] from the sampler to the current student."""
    return _importance(seen, mode, cap) * (seen.taken(seen.student).detach() - seen.taken(seen.before)).exp()


def _rewarded(advantage: PerAction, mode: str = "off", cap: float = UNCUT, *, opened: bool = True) -> PerAction:
    def losses(seen: View) -> Tensor:
        now, before = seen.taken(seen.student), seen.taken(seen.before)
        if opened:
            return -_importance(seen, mode, cap) * (now - before).exp() * advantage(seen)
        return _importance(seen, mode, cap) * textbook.clipped(now, before, advantage(seen))

    return losses


def _reward(seen: View) -> Tensor:
    """Return the reward of the episode for each action, [actions]."""
    return textbook.group_advantages(seen, "none", "none")


def _row(losses: PerAction, words: dict[str, Any], **fields: Any) -> Subject:
    """Return a subject whose plain loss is the mean of `losses`, with these settings."""
    several = words.get("epochs", 1) * words.get("minibatches", 1) > 1
    return Subject(
        build=fields.pop("build", builder(**words)),
        plain=textbook.token_mean(losses),
        updated=several,
        sampled_apart=words.get("importance", "off") != "off",
        schedule=scheduled(**words),
        each=losses if several else None,
        **fields,
    )


# ── distillation from the sampled token, with task rewards ───────────────────────────────────────────────────────────


def later_updates(objective: Objective) -> list[Subject]:
    """Return subjects of a formula over the sampled token, differentiated at tokens of an earlier student."""
    if objective.sees != "token" or objective.name == "k1":
        return []
    found = [_sampled(objective, AGAIN, LATER)]
    if objective.name == "k2":  # one is enough, because importance does not depend on the formula
        more = {**AGAIN, "importance": "truncate", "importance_cap": UNCUT}
        found.append(_sampled(objective, more, f"{APART}, {LATER}"))
    return found


def _sampled(objective: Objective, more: dict[str, Any], what: str) -> Subject:
    claim, mode = objective.supervised, more.get("importance", "off")
    words = {"objective": objective.name, "task_weight": KL, **UNCOMPARED, **OPEN, **more}
    formula, tasks = textbook.supervised(objective, SETTINGS, "sampled"), _rewarded(_reward, mode)

    def losses(seen: View) -> Tensor:
        return _weight(seen, mode) * formula(seen) + KL * tasks(seen)

    own = textbook.at_states(textbook.divergence(claim.divergence, SETTINGS))
    known = claim.divergence in textbook.DIVERGENCES
    sequences = textbook.of_sequences(claim.divergence, SETTINGS) if known else None
    return _row(
        losses,
        words,
        objective=objective.name,
        payload="sampled",
        form=f"supervised, task rewards, {what}",
        target="token",
        exact=claim.exact,
        note=f"{claim.note}; tokens are weighted by their current probability, at the states of the sampler",
        aim=textbook.combined((1.0, own), (KL, textbook.surrogate)),
        other=textbook.combined((1.0, sequences), (KL, textbook.surrogate)) if sequences is not None else None,
        smooth=False,
    )


def _whole_distribution() -> Subject:
    """A divergence of whole distributions, which needs no weights because it does not depend on the sampled token."""
    divergence, tasks = textbook.divergence("reverse_kl", SETTINGS), _rewarded(_reward)
    return _row(
        lambda seen: divergence(seen) + KL * tasks(seen),
        {"objective": "reverse_kl", "task_weight": KL, **UNCOMPARED, **OPEN, **AGAIN},
        objective="reverse_kl",
        payload="full",
        form=f"supervised, task rewards, {LATER}",
        target="token",
        exact=True,
        note="exact at the states of the sampler",
        aim=textbook.combined((1.0, textbook.at_states(divergence)), (KL, textbook.surrogate)),
    )


def _as_advantage() -> Subject:
    """k1 of the weights before the updates, because an advantage stays fixed during the updates of a batch."""

    def advantage(seen: View) -> Tensor:
        return seen.taken(seen.teacher) - seen.behaviour

    return _row(
        _rewarded(advantage),
        {"objective": "k1", "form": "policy_gradient", **OPEN, **AGAIN},
        objective="k1",
        payload="sampled",
        form=f"policy_gradient, {LATER}",
        discount=0,
        target="token",
        exact=False,
        note="PPO's surrogate: the advantage is that of the earlier weights, so it is reverse KL to first order",
        aim=textbook.at_states(textbook.divergence("reverse_kl", SETTINGS)),
        other=textbook.of_sequences("reverse_kl", SETTINGS),
    )


# ── the KL to the reference, in the loss ─────────────────────────────────────────────────────────────────────────────


def _references() -> list[Subject]:
    later = [_reference(estimator, AGAIN, LATER) for estimator in choices(schema.Grpo, "kl_estimator")]
    apart = {"importance": "truncate", "importance_cap": UNCUT}
    return [*later, _reference("k2", apart, APART), _reference("k3", {**apart, **AGAIN}, f"{APART}, {LATER}")]


def _reference(estimator: str, more: dict[str, Any], what: str) -> Subject:
    """A group of one has no advantage, so the KL is the only term."""
    pulled = "k2" if estimator == "k3_straight_through" else estimator
    claim = "forward_kl" if estimator == "k3" else "reverse_kl"
    mode = more.get("importance", "off")
    rewarded = _rewarded(lambda seen: textbook.group_advantages(seen, "mean", "none"), mode)

    def losses(seen: View) -> Tensor:
        pull = textbook.ESTIMATES[pulled](seen.taken(seen.student), seen.taken(seen.reference), SETTINGS)
        return rewarded(seen) + KL * _weight(seen, mode) * pull

    aim = toward_reference(textbook.at_states(textbook.divergence(claim, SETTINGS)))
    return _row(
        losses,
        {"name": "grpo", "kl": KL, "kl_estimator": estimator, "scale": "none", **OPEN, **more},
        objective="reference_kl",
        payload="reference",
        form=f"loss, {estimator}, {what}",
        target="token",
        exact=True,
        note="the gradient of KL" + ("(student‖reference)" if claim == "reverse_kl" else "(reference‖student)"),
        aim=textbook.combined((KL, aim)),
        agrees="reference",
        smooth=False,
    )


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rewards() -> list[Subject]:
    stays = "the reward if one action is from the current student and the others from the sampler"
    return [
        _grpo(LATER, AGAIN, exact=True, note=f"PPO's surrogate without its clip: {stays}"),
        _grpo(f"{LATER}, clipped", AGAIN, exact=False, opened=False, note="PPO's surrogate: its clip is a bias"),
        *(
            _grpo(f"{APART}, {mode}", {"importance": mode, "importance_cap": UNCUT}, exact=True, note=stays)
            for mode in ("truncate", "mask")
        ),
        *(
            _grpo(
                f"{APART}, {mode} at {CAP:g}",
                {"importance": mode, "importance_cap": CAP},
                exact=False,
                note="the cap causes a bias",
            )
            for mode in ("truncate", "mask")
        ),
        _grpo(
            f"{APART}, {LATER}",
            {"importance": "truncate", "importance_cap": UNCUT, **AGAIN},
            exact=True,
            note=stays,
        ),
    ]


def _grpo(what: str, more: dict[str, Any], *, exact: bool, note: str, opened: bool = True) -> Subject:
    mode, cap = more.get("importance", "off"), more.get("importance_cap", UNCUT)
    return _row(
        _rewarded(_reward, mode, cap, opened=opened),
        {"name": "grpo", **UNCOMPARED, **(OPEN if opened else {}), **more},
        objective="grpo",
        payload="rewards",
        form=f"none, none, {what}",
        target="token",
        exact=exact,
        note=note,
        aim=textbook.surrogate,
        other=textbook.negative_reward,
    )


def _returns() -> Subject:
    """REINFORCE++: with one reward at the end and no discount, all returns of an episode equal its reward."""
    return _row(
        _rewarded(lambda seen: textbook.white(_reward(seen))),
        {"name": "reinforce_plus_plus", **OPEN, **AGAIN},
        objective="reinforce_plus_plus",
        payload="rewards",
        form=f"whitened, {LATER}",
        target="token",
        exact=False,
        note="PPO's surrogate of returns that are whitened by the standard deviation of the batch",
        aim=textbook.surrogate,
        samples=GROUP,
        agrees="rewards",
    )


def _critics() -> Subject:
    """PPO's actor before whitening: the critic's value is an unbiased baseline here too."""

    def advantage(seen: View) -> Tensor:
        return textbook.general_advantages(seen, textbook.final_reward(seen), 1.0)

    words = {"name": "ppo", "gae_lambda": 1.0, **OPEN, **AGAIN}
    return _row(
        _rewarded(advantage),
        words,
        objective="ppo",
        payload="rewards",
        form=f"lambda 1, {LATER}",
        target="token",
        exact=True,
        note="before whitening: PPO's surrogate without its clip",
        build=before_whitening(builder(**words)),
        aim=textbook.surrogate,
    )
