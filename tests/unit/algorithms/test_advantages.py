"""Test advantages against plain loops in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutelage.algorithms.advantages import (
    Aggregation,
    Baseline,
    Scale,
    aggregation_weights,
    broadcast_episodes,
    episode_rewards,
    explained_variance,
    final_rewards,
    gae,
    group_advantages,
    return_to_go,
    whiten,
)
from tutelage.data.ragged import Ragged

Rows = list[list[float]]

# Coarse numbers make ties and equal groups frequent; the others have digits that sums round.
number = st.one_of(st.integers(-3, 3).map(float), st.floats(-10, 10, width=32), st.sampled_from([0.1, 0.3, -0.7]))
rows_of = st.lists(st.lists(number, max_size=6), max_size=5)
unit = st.one_of(st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.floats(0, 1))


def f64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(rows: Rows, dtype: torch.dtype = torch.float64) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)


def same(found: Ragged, rows: Rows) -> None:
    assert found.lengths.tolist() == [len(row) for row in rows]
    torch.testing.assert_close(found.values, f64([x for row in rows for x in row]), rtol=1e-9, atol=1e-9)


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────

episodes = st.lists(st.tuples(number, st.sampled_from([-5, 0, 3, 10**12])), max_size=14)


def plain_group_advantages(cases: list[tuple[float, int]], baseline: str, scale: str, epsilon: float) -> list[float]:
    everything = [reward for reward, _ in cases]
    out = []
    for i, (reward, group) in enumerate(cases):
        mates = [r for r, g in cases if g == group]
        others = [r for j, (r, g) in enumerate(cases) if g == group and j != i]
        equal = len(set(mates)) == 1
        if baseline != "none" and equal:
            out.append(0.0)
            continue
        level = {"mean": statistics.fmean(mates), "none": 0.0}.get(baseline)
        advantage = reward - (statistics.fmean(others) if level is None else level)
        if scale == "group_std" and not equal:
            advantage /= statistics.stdev(mates) + epsilon
        if scale == "batch_std" and len(set(everything)) > 1:
            advantage /= statistics.stdev(everything) + epsilon
        out.append(advantage)
    return out


@pytest.mark.parametrize("baseline", get_args(Baseline))
@pytest.mark.parametrize("scale", get_args(Scale))
@given(cases=episodes)
def test_group_advantages_against_a_loop(baseline: Baseline, scale: Scale, cases: list[tuple[float, int]]) -> None:
    rewards, groups = f64([r for r, _ in cases]), torch.tensor([g for _, g in cases], dtype=torch.int64)
    found = group_advantages(rewards, groups, baseline=baseline, scale=scale, epsilon=1e-3)
    expected = f64(plain_group_advantages(cases, baseline, scale, 1e-3))
    torch.testing.assert_close(found.advantages, expected, rtol=1e-9, atol=1e-9)
    equal = [len({r for r, g in cases if g == group}) == 1 for _, group in cases]
    assert found.zero_variance.tolist() == equal
    assert found.zero_variance.dtype == torch.bool


def test_known_advantages() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    grpo = group_advantages(rewards, groups, baseline="mean", scale="group_std", epsilon=0.0).advantages
    torch.testing.assert_close(grpo, torch.tensor([1.5, -0.5, -0.5, -0.5]))  # the std is 0.5, with Bessel's correction
    dr_grpo = group_advantages(rewards, groups, baseline="mean", scale="none").advantages
    assert dr_grpo.tolist() == [0.75, -0.25, -0.25, -0.25]
    rloo = group_advantages(rewards, groups, baseline="leave_one_out", scale="none").advantages
    torch.testing.assert_close(rloo, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    assert {x.dtype for x in (grpo, dr_grpo, rloo)} == {torch.float32}


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", get_args(Scale))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -1e6 / 7, 1e-30])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_rewards_give_exact_zeros(
    baseline: Baseline, scale: Scale, dtype: torch.dtype, reward: float, count: int
) -> None:
    """Also next to a group that varies, and without an epsilon to hide behind."""
    rewards = torch.tensor([reward] * count + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([0] * count + [1, 1])
    found = group_advantages(rewards, groups, baseline=baseline, scale=scale, epsilon=0.0)
    assert found.advantages[:count].tolist() == [0.0] * count
    assert bool((found.advantages[count:] != 0).all())
    assert found.zero_variance.tolist() == [True] * count + [False] * 2


def test_without_a_baseline_equal_rewards_stay() -> None:
    rewards, groups = torch.tensor([2.0, 2.0, 5.0]), torch.tensor([0, 0, 1])
    for scale in ("group_std", "none"):
        found = group_advantages(rewards, groups, baseline="none", scale=scale)
        assert found.advantages.tolist() == [2.0, 2.0, 5.0]
        assert found.zero_variance.tolist() == [True] * 3
    scaled = group_advantages(rewards, groups, baseline="none", scale="batch_std", epsilon=0.0).advantages
    torch.testing.assert_close(scaled, rewards / rewards.std())


def test_rounding_noise_in_a_group_stays_small() -> None:
    rewards = torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64)  # differ in the last bit
    found = group_advantages(rewards, torch.tensor([0, 0]), baseline="mean", scale="group_std")
    assert float(found.advantages.abs().max()) < 1e-11


def test_interleaving_groups_changes_nothing() -> None:
    rewards, groups = torch.randn(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) // 4
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for baseline in get_args(Baseline):
        straight = group_advantages(rewards, groups, baseline=baseline, scale="group_std").advantages
        mixed = group_advantages(rewards[order], groups[order], baseline=baseline, scale="group_std").advantages
        torch.testing.assert_close(mixed, straight[order])


# ── episodes of several trajectories ─────────────────────────────────────────────────────────────────────────────────


def test_the_final_trajectory_speaks_for_its_siblings() -> None:
    rewards = torch.tensor([9.0, 9.0, 1.0, 3.0, 9.0, 2.0])
    episode_of_row = torch.tensor([0, 0, 0, 1, 2, 2])
    per_episode = episode_rewards(rewards, episode_of_row, torch.tensor([2, 3, 5]))
    assert per_episode.tolist() == [1.0, 3.0, 2.0]
    assert broadcast_episodes(per_episode, episode_of_row).tolist() == [1.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert len(broadcast_episodes(episode_rewards(torch.zeros(0), nothing, nothing), nothing)) == 0


def test_a_reward_row_of_another_episode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"episode 0: row 1 is of episode 1, episode 2: row 0 is of episode 0"):
        episode_rewards(torch.zeros(3), torch.tensor([0, 1, 2]), torch.tensor([1, 1, 0]))


# ── returns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain_return(row: list[float], t: int, discount: float) -> float:
    return sum(discount ** (u - t) * row[u] for u in range(t, len(row)))


@given(rows=rows_of, discount=unit)
def test_return_to_go_against_a_loop(rows: Rows, discount: float) -> None:
    expected = [[plain_return(row, t, discount) for t in range(len(row))] for row in rows]
    same(return_to_go(ragged(rows), discount), expected)


def test_return_to_go_sums_in_float64_and_row_by_row() -> None:
    values = Ragged.from_rows([torch.full((3,), 1e30), torch.tensor([1.0, 2.0, 2**26])], dtype=torch.float32)
    found = return_to_go(values, 0.5)
    assert found.values.dtype == torch.float32
    assert float(found.row(1)[0]) == 2.0**24 + 2  # in float32, one by one, both small ones would be lost


def plain_gae(reward: list[float], value: list[float], discount: float, lam: float) -> list[float]:
    following = [*value[1:], 0.0]
    surprise = [r + discount * n - v for r, n, v in zip(reward, following, value, strict=False)]
    return [plain_return(surprise, t, discount * lam) for t in range(len(surprise))]


@given(pairs=st.lists(st.lists(st.tuples(number, number), max_size=6), max_size=5), discount=unit, lam=unit)
def test_gae_against_a_loop(pairs: list[list[tuple[float, float]]], discount: float, lam: float) -> None:
    rewards, values = [[r for r, _ in row] for row in pairs], [[v for _, v in row] for row in pairs]
    expected = [plain_gae(reward, value, discount, lam) for reward, value in zip(rewards, values, strict=True)]
    advantages, returns = gae(ragged(rewards), ragged(values), discount=discount, lam=lam)
    same(advantages, expected)
    same(returns, [[a + v for a, v in zip(*both, strict=True)] for both in zip(expected, values, strict=True)])


def test_gae_at_its_ends() -> None:
    rewards, values = ragged([[1.0, 2.0, 4.0], [8.0]]), ragged([[0.5, 0.25, 1.0], [3.0]])
    advantages, returns = gae(rewards, values, discount=1.0, lam=1.0)  # Monte Carlo: the critic is a baseline only
    same(returns, [[7.0, 6.0, 4.0], [8.0]])
    same(advantages, [[6.5, 5.75, 3.0], [5.0]])
    advantages, _ = gae(rewards, values, discount=0.5, lam=0.0)  # one step: the critic is trusted
    same(advantages, [[1 + 0.125 - 0.5, 2 + 0.5 - 0.25, 3.0], [5.0]])


def test_gae_with_the_true_values_has_no_advantage() -> None:
    rewards = ragged([[0.0, 0.0, 1.0], [0.3]])
    advantages, _ = gae(rewards, return_to_go(rewards, 0.9), discount=0.9, lam=0.7)
    assert float(advantages.values.abs().max()) < 1e-12


def test_gae_holds_the_critic_fixed_and_wants_the_same_rows() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    values = Ragged(leaf, torch.tensor([0, 2, 3]))
    advantages, returns = gae(values.map(torch.ones_like), values, discount=0.9, lam=0.9)
    assert not advantages.values.requires_grad
    assert not returns.values.requires_grad
    with pytest.raises(ValueError, match=r"lengths \[1, 2\] and \[2, 1\]"):
        gae(Ragged(torch.zeros(3), torch.tensor([0, 1, 3])), values, discount=0.9, lam=0.9)


def test_rewards_come_at_the_last_action() -> None:
    found = final_rewards(torch.tensor([5.0, 6.0, 7.0, 8.0]), torch.tensor([2, 0, 1, 3]))
    assert [row.tolist() for row in found.rows()] == [[0.0, 5.0], [], [7.0], [0.0, 0.0, 8.0]]
    assert found.values.dtype == torch.float32
    for lengths in ([], [0, 0]):
        silent = final_rewards(torch.ones(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        assert silent.lengths.tolist() == lengths


# ── scale ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(rows=rows_of, shift=st.booleans())
def test_whiten_against_a_loop(rows: Rows, shift: bool) -> None:
    flat = [x for row in rows for x in row]
    if len(set(flat)) < 2:
        expected = [[0.0 if shift else x for x in row] for row in rows]
    else:
        mean, std = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
        expected = [[(x - mean) / std + (0.0 if shift else mean) for x in row] for row in rows]
    same(whiten(ragged(rows), shift=shift), expected)


def test_whitened_values_have_mean_0_and_variance_1() -> None:
    values = ragged([[3.0, 5.0, 90.0], [], [-1.0]])
    white = whiten(values).values
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(white.var()) == pytest.approx(1.0, abs=1e-9)
    kept = whiten(values, shift=False).values
    assert float(kept.mean()) == pytest.approx(float(values.values.mean()))
    assert float(kept.var()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("rows", [[], [[]], [[0.1]], [[0.1, 0.1], [], [0.1]]])
def test_whiten_without_a_spread_is_exact(rows: Rows) -> None:
    values = ragged(rows)
    assert whiten(values).values.tolist() == [0.0] * len(values.values)
    assert torch.equal(whiten(values, shift=False).values, values.values)


@given(pairs=st.lists(st.tuples(number, number), max_size=12))
def test_explained_variance_against_a_formula(pairs: list[tuple[float, float]]) -> None:
    values, returns = [v for v, _ in pairs], [r for _, r in pairs]
    found = explained_variance(f64(values), f64(returns))
    assert math.isfinite(found)
    if len(set(returns)) < 2:
        assert found == 0.0
    else:
        left = statistics.pvariance([r - v for v, r in pairs])
        assert found == pytest.approx(1 - left / statistics.pvariance(returns), rel=1e-6, abs=1e-6)


def test_explained_variance_of_known_critics() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 5, returns) == 1.0  # a constant error explains as much
    assert explained_variance(torch.full((4,), 0.7), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(f64([0.0, 1.0, 2.0]), f64([0.1] * 3)) == 0.0  # three times 0.1 has a mean that is rounded


# ── aggregation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def plain_aggregate(rows: Rows, mode: str, max_tokens: int) -> float:
    acted = [row for row in rows if row]
    if not acted:
        return 0.0
    if mode == "token_mean":
        return sum(sum(row) for row in acted) / sum(len(row) for row in acted)
    if mode == "sequence_mean":
        return sum(sum(row) / len(row) for row in acted) / len(acted)
    return sum(sum(row) for row in acted) / (len(acted) * max_tokens)


@pytest.mark.parametrize("mode", get_args(Aggregation))
@given(rows=rows_of, max_tokens=st.integers(1, 64))
def test_aggregation_weights_against_a_loop(mode: Aggregation, rows: Rows, max_tokens: int) -> None:
    losses = ragged(rows)
    weights = aggregation_weights(losses.lengths, mode, max_tokens)
    assert weights.dtype == torch.float32
    assert weights.shape == losses.values.shape
    total = float((weights.double() * losses.values).sum()) / max(1, len(weights))
    assert total == pytest.approx(plain_aggregate(rows, mode, max_tokens), rel=1e-5, abs=1e-4)


def test_aggregation_modes_differ_where_lengths_do() -> None:
    lengths = torch.tensor([1, 0, 3])
    assert aggregation_weights(lengths, "token_mean", 8).tolist() == [1.0] * 4
    torch.testing.assert_close(aggregation_weights(lengths, "sequence_mean", 8), torch.tensor([2.0, *[2 / 3] * 3]))
    assert aggregation_weights(lengths, "sequence_sum", 8).tolist() == [4 / 16] * 4
    torch.testing.assert_close(
        aggregation_weights(torch.tensor([5, 5]), "sequence_mean", 8),
        aggregation_weights(torch.tensor([5, 5]), "token_mean", 8),
    )
