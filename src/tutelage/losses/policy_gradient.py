"""The clipped policy gradient, importance weights between sampler and learner, and the KL penalty; per action.

All arguments are [actions]. Only `logp`, the student's log-prob of its actions, carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from tutelage.losses import distillation

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exponentiation: e^20 is 5e8, so sums of such ratios stay finite."""

ImportanceMode = Literal["off", "truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]


@dataclass(frozen=True, slots=True)
class Clipped:
    """The loss per action, and flags for actions without gradient; all [actions], the flags bool."""

    loss: Tensor
    clipped: Tensor
    """the ratio has left the clip range in the direction of the advantage: no gradient"""
    dual_clipped: Tensor
    """the advantage is negative and the loss is at its bound: no gradient"""
    overflowed: Tensor
    """the log-ratio exceeds the limit: no gradient; the other flags may be set too"""


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """The factor of each action's loss; both [actions], without gradient."""

    weight: Tensor
    cut: Tensor
    """bool: the ratio was truncated or the action masked"""


def clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual: float | None
) -> Clipped:
    """Compute PPO's pessimistic loss, with the ratio of each action clipped to [1 − clip_low, 1 + clip_high].

    `dual` (above 1) bounds the loss at negative advantages to dual·|A|; None leaves it unbounded. An infinite
    log-ratio (one side gives the action probability 0) is allowed and counts as overflowed; NaN stays NaN.
    """
    log_ratio = logp - old_logp
    ratio = _bounded_exp(log_ratio)
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    cut = (bounded > plain).detach()
    loss = torch.where(cut, bounded, plain)
    over = torch.zeros_like(cut)
    if dual is not None:
        ceiling = -advantage * dual
        over = ((advantage < 0) & (loss > ceiling)).detach()
        loss = torch.where(over, ceiling, loss)
    return Clipped(loss, cut, over, (log_ratio.abs() > LOG_RATIO_LIMIT).detach())


def dual_clip(logp: Tensor, old_logp: Tensor, advantage: Tensor, clip: float, dual: float) -> Clipped:
    """Compute `clipped` with the range 1 ± `clip`, and the loss at negative advantages bounded to `dual`·|A|."""
    return clipped(logp, old_logp, advantage, clip_low=clip, clip_high=clip, dual=dual)


@torch.no_grad()
def importance_weight(
    learner_logp: Tensor, behaviour_logp: Tensor, *, mode: ImportanceMode, cap: float
) -> ImportanceWeight:
    """Compute weights that correct for the difference between the sampler, which drew the actions, and the learner.

    They are based on the ratio learner/behaviour of each action: `truncate` gives min(ratio, cap); `mask` gives the
    ratio inside [1/cap, cap] and 0 outside; `off` gives 1. `cap` is at least 1, and has no effect above e^20.
    """
    if mode == "off":
        return ImportanceWeight(torch.ones_like(learner_logp), torch.zeros_like(learner_logp, dtype=torch.bool))
    ratio = _bounded_exp(learner_logp - behaviour_logp)
    if mode == "truncate":
        return ImportanceWeight(ratio.clamp_max(cap), ratio > cap)
    if mode == "mask":
        outside = (ratio > cap) | (ratio < 1 / cap)
        return ImportanceWeight(ratio.masked_fill(outside, 0.0), outside)
    assert_never(mode)


@torch.no_grad()
def reuse_weight(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Compute the ratio of each action's probability now to that before the updates, [actions], at most e^20.

    An estimate from the sampled token is unbiased over tokens that the current student draws. When a batch is used for
    several updates, its tokens come from the weights before the first one. This weight, which has no gradient, makes
    estimates unbiased for the current weights, at the same states.
    """
    return _bounded_exp(logp - old_logp)


def kl_penalty(logp: Tensor, ref_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(student‖reference) at actions that the student drew, [actions]; q is the student, r the reference.

    estimator             mean value         mean gradient, as a term of a loss
    k1                    KL(q‖r), exact     always 0
    k2                    biased, ≥ 0        KL(q‖r)
    k3                    KL(q‖r), exact     KL(r‖q), the other direction
    k3_straight_through   KL(q‖r), exact     KL(q‖r)

    The mean is over tokens drawn by the current student; after an update, multiply by `reuse_weight`.

    Use k1 in the reward (detached by the caller), and k2 or k3_straight_through in the loss. The reference's log-probs
    are floored like a teacher's, so an action that it excludes has a finite cost.
    """
    if estimator == "k1":
        return distillation.k1(logp, ref_logp)
    if estimator == "k2":
        return distillation.k2(logp, ref_logp)
    if estimator == "k3":
        return distillation.k3(logp, ref_logp)
    if estimator == "k3_straight_through":
        pull = distillation.k2(logp, ref_logp)
        return distillation.k3(logp, ref_logp).detach() + (pull - pull.detach())
    assert_never(estimator)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
