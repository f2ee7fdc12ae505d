"""Advantages from rewards: group statistics, returns, GAE, whitening, and the weights of actions in a batch.

Pure functions, without gradients. Sums are computed in float64; results have the dtype of the input. Statistics are
over the given batch, so call these functions on the whole batch, before it is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from tutelage.data.ragged import Ragged, offsets_of

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group_std", "batch_std", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]

WHITEN_EPSILON = 1e-8
"""Added to the variance, so that whitening does not scale rounding errors up to 1."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """One value for each episode."""

    advantages: Tensor
    """[episodes], dtype of the rewards"""
    zero_variance: Tensor
    """bool [episodes]: all rewards of the episode's group are equal, as they always are in a group of one"""


@torch.no_grad()
def group_advantages(
    rewards: Tensor, groups: Tensor, *, baseline: Baseline, scale: Scale, epsilon: float = 1e-4
) -> GroupAdvantages:
    """Compute (reward − baseline) / (std + epsilon).

    rewards [episodes]; groups int64 [episodes], the group number of each episode. GRPO uses mean and group_std,
    Dr. GRPO mean and none, RLOO leave_one_out and none. The standard deviation is that of the rewards, with Bessel's
    correction; batch_std is over all episodes of the batch.

    If all rewards of a group are equal, the advantages with a baseline are exactly 0. This includes a group of one,
    where leave_one_out has no other episode. Without a baseline they are the rewards, not divided by group_std
    (batch_std still scales them, unless all rewards of the batch are equal).
    """
    wide = rewards.double()
    _, member = torch.unique(groups, return_inverse=True)
    count = torch.bincount(member).double()
    lowest, highest = (
        wide.new_empty(len(count)).scatter_reduce(0, member, wide, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    equal = (lowest == highest)[member]
    mean = _group_sums(wide, member, len(count)) / count
    centred = (wide - mean[member]).masked_fill(equal, 0.0)
    others = (count - 1).clamp_min(1)
    advantages = _less_baseline(wide, centred, (count / others)[member], baseline)
    if scale == "group_std":
        std = (_group_sums(centred.square(), member, len(count)) / others).sqrt()
        advantages = torch.where(equal, advantages, advantages / (std[member] + epsilon))
    elif scale == "batch_std":
        variance = _variance(wide)
        advantages = advantages / (variance**0.5 + epsilon) if variance > 0 else advantages
    return GroupAdvantages(advantages.to(rewards.dtype), equal)


def _less_baseline(rewards: Tensor, centred: Tensor, stretch: Tensor, baseline: Baseline) -> Tensor:
    """Subtract the baseline. `stretch` is n / (n − 1): r − (Σ − r) / (n − 1) = (r − Σ / n) · n / (n − 1)."""
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return centred * stretch
    if baseline == "none":
        return rewards
    assert_never(baseline)


def broadcast_episodes(values: Tensor, episode_of_row: Tensor) -> Tensor:
    """Return [rows]: the value of each row's episode; values [episodes], episode_of_row int64 [rows]."""
    return values[episode_of_row]


def episode_rewards(rewards: Tensor, episode_of_row: Tensor, reward_row: Tensor) -> Tensor:
    """Return [episodes]: the reward of each episode, read from one of its rows, usually its final trajectory.

    rewards [rows]; episode_of_row int64 [rows], episodes counted from 0; reward_row int64 [episodes], row numbers
    within the batch. `broadcast_episodes` maps values of episodes back to all of their rows.
    """
    owner = episode_of_row[reward_row]
    wrong = (owner != torch.arange(len(reward_row))).nonzero().squeeze(-1).tolist()
    if wrong:
        found = ", ".join(f"episode {i}: row {int(reward_row[i])} is of episode {int(owner[i])}" for i in wrong)
        raise ValueError(f"reward_row must name a row of the episode itself, but {found}")
    return rewards[reward_row]


@torch.no_grad()
def return_to_go(values: Ragged, discount: float) -> Ragged:
    """Compute Σ_{u ≥ t} discount^(u − t) · values_u within each row, for values [actions], discount in [0, 1]."""
    totals = _discounted(values.map(Tensor.double).to_padded(0.0), discount)
    return _like(values, totals)


@torch.no_grad()
def gae(rewards: Ragged, values: Ragged, *, discount: float, lam: float) -> tuple[Ragged, Ragged]:
    """Compute generalised advantage estimates, and the returns that the critic learns: advantages + values.

    Both arguments are [actions] with the same rows; both results have the dtype of `values`. A row ends with its last
    action: the value after it is 0.
    """
    if not torch.equal(rewards.offsets, values.offsets):
        raise ValueError(
            f"rewards and values must have the same rows, got lengths {rewards.lengths.tolist()} "
            f"and {values.lengths.tolist()}"
        )
    reward, value = (x.map(Tensor.double).to_padded(0.0) for x in (rewards, values))
    following = torch.zeros_like(value)
    following[:, :-1] = value[:, 1:]
    advantages = _discounted(reward + discount * following - value, discount * lam)
    return _like(values, advantages), _like(values, advantages + value)


def final_rewards(rewards: Tensor, lengths: Tensor) -> Ragged:
    """Place the reward of each row at its last action, and 0 before it.

    rewards [rows]; lengths int64 [rows], in actions. The reward of a row without actions is left out.
    """
    offsets = offsets_of(lengths)
    values = rewards.new_zeros(int(offsets[-1]))
    acted = lengths > 0
    values[offsets[1:][acted] - 1] = rewards[acted]
    return Ragged(values, offsets)


@torch.no_grad()
def whiten(values: Ragged, *, shift: bool = True) -> Ragged:
    """Scale to mean 0 and variance 1 (Bessel's correction) over all actions; without `shift`, keep the mean.

    If all values are equal or there are fewer than two, they become 0, or stay unchanged without `shift`.
    """
    wide = values.values.double()
    variance = _variance(wide)
    if variance == 0:
        return values.map(torch.zeros_like) if shift else values
    mean = wide.mean()
    scaled = (wide - mean) / (variance + WHITEN_EPSILON) ** 0.5
    return values.map(lambda flat: (scaled if shift else scaled + mean).to(flat.dtype))


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Compute 1 − Var(returns − values) / Var(returns), both [actions].

    1 means a perfect critic, 0 one that is no better than a constant. Returns 0.0 if the returns do not vary.
    """
    total = _variance(returns.double())
    return 1.0 - _variance(returns.double() - values.double()) / total if total > 0 else 0.0


def aggregation_weights(lengths: Tensor, mode: Aggregation, max_tokens: int) -> Tensor:
    """Return float32 [actions]: weights w such that Σ w·l / N, over the N actions of the batch, is one of these means.

    token_mean      Σ l / N: every action has the same weight
    sequence_mean   the mean over rows of each row's mean: every row has the same weight
    sequence_sum    Σ l / (rows · max_tokens): the denominator does not depend on the lengths (Dr. GRPO)

    lengths int64 [rows], in actions; rows without actions do not count. Only sequence_sum uses `max_tokens`.
    """
    actions, rows = int(lengths.sum()), int((lengths > 0).sum())
    if mode == "token_mean":
        return torch.ones(actions)
    if mode == "sequence_mean":
        per_row = actions / (rows * lengths.double())
        return torch.repeat_interleave(per_row, lengths).float()
    if mode == "sequence_sum":
        return torch.full((actions,), actions / (rows * max_tokens) if rows else 0.0)
    assert_never(mode)


def _group_sums(values: Tensor, member: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, member, values)


def _variance(values: Tensor) -> float:
    """Compute the variance with Bessel's correction; exactly 0, without rounding, if all values are equal."""
    if len(values) < 2 or bool(values.min() == values.max()):
        return 0.0
    return float(values.var())


def _discounted(padded: Tensor, factor: float) -> Tensor:
    """Sum from each position to the end of [rows, longest], discounting by `factor` per step."""
    if factor == 1.0:
        return padded.flip(1).cumsum(1).flip(1)
    out = torch.empty_like(padded)
    running = padded.new_zeros(len(padded))
    for t in range(padded.shape[1] - 1, -1, -1):
        running = padded[:, t] + factor * running
        out[:, t] = running
    return out


def _like(values: Ragged, padded: Tensor) -> Ragged:
    """Return the rows of a padded tensor with the lengths and dtype of `values`."""
    return Ragged.from_padded(padded.to(values.values.dtype), values.lengths)
