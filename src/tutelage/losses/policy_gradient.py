"""The clipped policy gradient, the correction between sampler and learner, and the pull to a reference; per action.

All arguments are [actions]. Only `logp`, the student's log-prob of what it did, carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from tutelage.losses import distillation

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to ± this before they are exponentiated: e^20 is 5e8, so sums of such ratios stay finite."""

ImportanceMode = Literal["off", "truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]


@dataclass(frozen=True, slots=True)
class Clipped:
    """Loss per action and what took its gradient; all [actions], the flags bool."""

    loss: Tensor
    clipped: Tensor
    """the ratio has already moved out of the clip range in the direction of the advantage: no gradient"""
    dual_clipped: Tensor
    """the advantage is negative and the loss stands at its bound: no gradient"""
    overflowed: Tensor
    """the log-ratio lies beyond the limit: no gradient either; the other flags may be set too"""


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """What to multiply each action's loss with; both [actions], without gradient."""

    weight: Tensor
    cut: Tensor
    """bool: the ratio was truncated or the action masked"""


def clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual: float | None
) -> Clipped:
    """PPO's pessimistic clip of the ratio to [1 − clip_low, 1 + clip_high], for each action by itself.

    `dual` (above 1) bounds the loss at negative advantages to dual·|A|; None leaves it unbounded. An infinite
    log-ratio (an action that one side calls impossible) is ordinary and counts as overflowed; NaN stays NaN.
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
    """The same range above and below 1, and a bound `dual`·|A| of the loss at negative advantages."""
    return clipped(logp, old_logp, advantage, clip_low=clip, clip_high=clip, dual=dual)


@torch.no_grad()
def importance_weight(
    learner_logp: Tensor, behaviour_logp: Tensor, *, mode: ImportanceMode, cap: float
) -> ImportanceWeight:
    """Correct for actions that were drawn by the sampler but are learned from as if drawn by the learner.

    The ratio learner/behaviour of each action: truncate takes min(ratio, cap); mask takes the ratio inside
    [1/cap, cap] and 0 outside; off is 1 everywhere. `cap` is at least 1, and below e^20 to have an effect.
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
    """How much more likely each action is now than before the updates, [actions], without gradient; at most e^20.

    An estimate from the sampled token has the right mean over tokens that the student draws. While a batch is learned
    from again, its tokens are those of the weights before: weighed by this, estimates have the mean over tokens of the
    weights now, at the same states.
    """
    return _bounded_exp(logp - old_logp)


def kl_penalty(logp: Tensor, ref_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(student‖reference) at actions that the student drew, [actions].

    estimator             mean value         mean gradient, as a term of a loss
    k1                    KL(q‖r), exact     none: 0 whatever the student does
    k2                    biased, ≥ 0        KL(q‖r), the divergence that is named
    k3                    KL(q‖r), exact     KL(r‖q), the other direction
    k3_straight_through   KL(q‖r), exact     KL(q‖r)

    The mean is over tokens of the student as it is: after updates, see `reuse_weight`.

    So k1 belongs into the reward (detached by the caller), and k2 or k3_straight_through into the loss. The
    reference's log-probs are floored as a teacher's are, so an action it excludes costs a finite amount.
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
