"""From rewards to advantages: group statistics, returns, GAE, whitening, and how actions are weighed in a batch.

Pure functions, without gradients. Sums are made in float64; results have the dtype of what came in. Statistics are
those of the batch that is given, so it must be the whole one: compute them before the batch is split.
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
"""Added to the variance, so that differences of a rounding error do not become differences of 1."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """One value for each episode."""

    advantages: Tensor
    """[episodes], dtype of the rewards"""
    zero_variance: Tensor
    """bool [episodes]: all rewards of the episode's group are equal; a group of one always is such a group"""


@torch.no_grad()
def group_advantages(
    rewards: Tensor, groups: Tensor, *, baseline: Baseline, scale: Scale, epsilon: float = 1e-4
) -> GroupAdvantages:
    """(reward − baseline) / (std + epsilon), from rewards [episodes] and the group number of each, int64 [episodes].

    GRPO is mean and group_std, Dr. GRPO mean and none, RLOO leave_one_out and none. Standard deviations are of the
    rewards, with Bessel's correction; batch_std is over all episodes, whatever their group.

    Equal rewards have nothing to tell apart: with a baseline their advantages are exactly 0, also in a group of one,
    where leave_one_out has no others to compare with. Without a baseline they are the rewards, not scaled by a
    deviation of 0 (batch_std still scales them, unless the whole batch is equal).
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
    """`stretch` is n / (n − 1): r − (Σ − r) / (n − 1) = (r − Σ / n) · n / (n − 1)."""
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return centred * stretch
    if baseline == "none":
        return rewards
    assert_never(baseline)


def broadcast_episodes(values: Tensor, episode_of_row: Tensor) -> Tensor:
    """[rows]: each row gets the value of its episode; values [episodes], episode_of_row int64 [rows]."""
    return values[episode_of_row]


def episode_rewards(rewards: Tensor, episode_of_row: Tensor, reward_row: Tensor) -> Tensor:
    """[episodes]: the reward of the one row that speaks for each episode, usually its final trajectory.

    rewards [rows]; episode_of_row int64 [rows], episodes counted from 0; reward_row int64 [episodes], row numbers
    within the batch. `broadcast_episodes` then takes what became of the reward to the sibling rows.
    """
    owner = episode_of_row[reward_row]
    wrong = (owner != torch.arange(len(reward_row))).nonzero().squeeze(-1).tolist()
    if wrong:
        found = ", ".join(f"episode {i}: row {int(reward_row[i])} is of episode {int(owner[i])}" for i in wrong)
        raise ValueError(f"reward_row must name a row of the episode itself, but {found}")
    return rewards[reward_row]


@torch.no_grad()
def return_to_go(values: Ragged, discount: float) -> Ragged:
    """Σ_{u ≥ t} discount^(u − t) · values_u within each row, for values [actions] and a discount in [0, 1]."""
    totals = _discounted(values.map(Tensor.double).to_padded(0.0), discount)
    return _like(values, totals)


@torch.no_grad()
def gae(rewards: Ragged, values: Ragged, *, discount: float, lam: float) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimates, and the returns that the critic learns: advantages + values.

    Both arguments [actions], with the same rows; both results have the dtype of `values`. A row ends with its last
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
    """The reward at the last action of each row, 0 before it; rewards [rows], lengths int64 [rows], in actions.

    A row without actions has no place for its reward: it is left out.
    """
    offsets = offsets_of(lengths)
    values = rewards.new_zeros(int(offsets[-1]))
    acted = lengths > 0
    values[offsets[1:][acted] - 1] = rewards[acted]
    return Ragged(values, offsets)


@torch.no_grad()
def whiten(values: Ragged, *, shift: bool = True) -> Ragged:
    """Mean 0 and variance 1 (Bessel's correction) over all actions of the batch; without `shift` the mean is kept.

    Values that are all equal, or fewer than two, have no spread to scale: they become 0, or stay without `shift`.
    """
    wide = values.values.double()
    variance = _variance(wide)
    if variance == 0:
        return values.map(torch.zeros_like) if shift else values
    mean = wide.mean()
    scaled = (wide - mean) / (variance + WHITEN_EPSILON) ** 0.5
    return values.map(lambda flat: (scaled if shift else scaled + mean).to(flat.dtype))


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns), both [actions]: 1 is a perfect critic, 0 no better than a constant.

    0.0 where the returns do not vary: there is nothing to explain.
    """
    total = _variance(returns.double())
    return 1.0 - _variance(returns.double() - values.double()) / total if total > 0 else 0.0


def aggregation_weights(lengths: Tensor, mode: Aggregation, max_tokens: int) -> Tensor:
    """float32 [actions]: weights w such that Σ w·l / N, over all N actions of the batch, is the mean that is named.

    token_mean      Σ l / N, every action counts the same
    sequence_mean   the mean over rows of each row's mean, every row counts the same
    sequence_sum    Σ l / (rows · max_tokens), a denominator that does not depend on what was written (Dr. GRPO)

    lengths int64 [rows], in actions; rows without actions do not count. `max_tokens` serves sequence_sum only.
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
    """With Bessel's correction; exactly 0 where all are equal, without the rounding of their mean."""
    if len(values) < 2 or bool(values.min() == values.max()):
        return 0.0
    return float(values.var())


def _discounted(padded: Tensor, factor: float) -> Tensor:
    """Sums from each position to the end of [rows, longest], each step further weighing `factor` less."""
    if factor == 1.0:
        return padded.flip(1).cumsum(1).flip(1)
    out = torch.empty_like(padded)
    running = padded.new_zeros(len(padded))
    for t in range(padded.shape[1] - 1, -1, -1):
        running = padded[:, t] + factor * running
        out[:, t] = running
    return out


def _like(values: Ragged, padded: Tensor) -> Ragged:
    """The rows of a padded tensor, with the lengths and the dtype of `values`."""
    return Ragged.from_padded(padded.to(values.values.dtype), values.lengths)
