"""Test how the objectives of verl are written here: where they are equal, and where they differ. See
docs/from_verl.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from peers import (
    verl_clipped,
    verl_gae,
    verl_grpo,
    verl_kl,
    verl_reduced,
    verl_reinforce,
    verl_rloo,
    verl_topk,
    verl_value,
)
from tutelage.algorithms.advantages import Aggregation, aggregation_weights, gae, group_advantages, return_to_go, whiten
from tutelage.config.schema import Config
from tutelage.data.ragged import Ragged
from tutelage.losses.distillation import (
    absolute,
    buckets,
    forward_kl,
    forward_kl_topk,
    k1,
    k2,
    k3,
    low_var_kl,
    teacher_buckets,
)
from tutelage.losses.policy_gradient import clipped, kl_penalty
from tutelage.losses.value import value_loss

LENGTHS = torch.tensor([6, 2, 4, 1])
MASK = (torch.arange(6)[None] < LENGTHS[:, None]).float()
Estimate = Callable[[Tensor, Tensor], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value_and_slope(estimate: Estimate, logp: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logp.clone().requires_grad_()
    value = estimate(leaf, other)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def acting(padded: Tensor) -> Ragged:
    return Ragged.from_padded(padded, LENGTHS)


# ── distillation ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("loss_mode", "ours"),
    [
        ("k1", k1),
        ("kl", k1),
        ("k2", k2),
        ("mse", k2),
        ("abs", absolute),
        ("k3", low_var_kl),
        ("low_var_kl", low_var_kl),
    ],
)
def test_a_loss_mode_is_an_objective(loss_mode: str, ours: Estimate) -> None:
    """In value and gradient, at gaps where verl's clamps apply too. verl's k3 is our low_var_kl."""
    student, teacher = -8 * drawn(300).abs(), -8 * drawn(300, seed=1).abs()
    found = value_and_slope(ours, student, teacher)
    torch.testing.assert_close(found, value_and_slope(lambda q, p: verl_kl(q, p, loss_mode), student, teacher))


def test_k3_differs_where_verl_clamps_it() -> None:
    student = torch.tensor([-1.0, -3.0, -8.0])
    teacher = torch.full((3,), -0.5)
    (ours, slope), (theirs, flat) = (
        value_and_slope(estimate, student, teacher) for estimate in (k3, lambda q, p: verl_kl(q, p, "k3"))
    )
    torch.testing.assert_close(ours[:2], theirs[:2])
    assert float(theirs[2]) == 10.0
    assert float(ours[2]) > 1000
    assert float(flat[2]) == 0.0, "no gradient where the student is worst"
    assert float(slope[2]) < -1000


def test_forward_kl_topk_is_verls_with_the_clamps_of_its_data_class() -> None:
    ids = (4 * drawn(200, 50)).log_softmax(-1).topk(8)
    teacher, log_probs = ids.values, (torch.linspace(0.5, 8, 200)[:, None] * drawn(200, 50, seed=1)).log_softmax(-1)
    student = log_probs.gather(-1, ids.indices)
    theirs = verl_topk(student, teacher, floor=-10.0, ceiling=10.0)
    torch.testing.assert_close(forward_kl_topk(student, teacher), theirs)
    unclamped = verl_topk(student, teacher, floor=None, ceiling=None)
    assert float((unclamped - theirs).abs().max()) > 0.1, "verl's YAML sets both clamps to null"
    near = (student.min(-1).values > -10) & (teacher.min(-1).values > -10) & (unclamped < 10)
    assert bool(near.any())
    torch.testing.assert_close(forward_kl_topk(student[near], teacher[near]), unclamped[near])


def test_a_bucket_for_the_rest_has_a_gradient_where_forward_kl_topk_has_none() -> None:
    """The student gives the teacher's tokens too much mass: verl's sum is negative and clamped, ours is not."""
    teacher = torch.tensor([[0.3, 0.2, 0.25, 0.25]]).log()
    student = torch.tensor([[0.55, 0.43, 0.01, 0.01]]).log()
    ids = torch.tensor([[0, 1]])
    named = teacher.gather(-1, ids)
    value, slope = value_and_slope(
        lambda q, p: verl_topk(q.log_softmax(-1).gather(-1, ids), p, floor=None, ceiling=None), student, named
    )
    assert float(value) == 0.0
    assert float(slope.abs().max()) == 0.0
    ours, pull = value_and_slope(
        lambda q, p: forward_kl(buckets(q.log_softmax(-1), ids), teacher_buckets(p, None, 4)), student, named
    )
    assert float(ours) > 0.5
    assert float(pull.abs().max()) > 0.1


def test_the_advantage_of_a_distillation_is_bounded_by_loss_max_clamp_only() -> None:
    """`use_policy_gradient`: the negative loss is the advantage in both; verl bounds it by ±loss_max_clamp if set."""
    student, teacher = torch.tensor([-1.0, -1.0]), torch.tensor([-4.0, -30.0])
    theirs = -verl_kl(student, teacher, "k1").clamp(-10, 10)
    assert theirs.tolist() == [-3.0, -10.0]
    assert (-k1(student, teacher)).tolist() == [-3.0, -29.0]


def distilling(**sections: Any) -> Config:
    given = {"student": {"path": "m"}, "teachers": {"big": {"path": "m"}}, "data": {"train": "p"}, **sections}
    return Config.model_validate(given)


def test_a_teacher_is_at_temperature_1_unless_it_is_set() -> None:
    """As in verl, whose student is at the temperature of the rollout."""
    config = distilling(rollout={"temperature": 0.5})
    assert (config.student_temperature, config.teacher_temperature("big")) == (0.5, 1.0)
    matched = distilling(rollout={"temperature": 0.5}, teachers={"big": {"path": "m", "temperature": "match"}})
    assert matched.teacher_temperature("big") == 0.5


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"objective": "forward_kl_topk", "form": "policy_gradient"}, "as an advantage it has no gradient"),
        ({"objective": "k1"}, "no gradient in expectation when differentiated"),
        ({"name": "grpo"}, "rollout.samples must be at least 2"),
    ],
)
def test_what_is_refused_here(algorithm: dict[str, Any], reason: str) -> None:
    """verl warns of the first, refuses the second too, and gives a group of one its score."""
    rewarded = {"teachers": {}, "rewards": {"right": {"function": "exact_match"}}} if "name" in algorithm else {}
    with pytest.raises(ValidationError, match=reason):
        distilling(algorithm=algorithm, **rewarded)


# ── the policy loss ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_vanilla_policy_loss_is_the_dual_clip() -> None:
    old, advantage = 3 * drawn(500), drawn(500, seed=1)
    logp = old + 3 * drawn(500, seed=2)
    logp[:4] = old[:4] + torch.tensor([25.0, -25.0, 30.0, -30.0])  # beyond the bound on log-ratios, 20 in both
    ours = value_and_slope(
        lambda q, o: clipped(q, o, advantage, clip_low=0.2, clip_high=0.28, dual=3.0).loss, logp, old
    )
    theirs = value_and_slope(lambda q, o: verl_clipped(q, o, advantage, 0.2, 0.28, 3.0), logp, old)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("theirs", "ours", "factor"),
    [
        ("token-mean", "token_mean", 1),
        ("seq-mean-token-mean", "sequence_mean", 1),
        ("seq-mean-token-sum-norm", "sequence_sum", 1),
        ("seq-mean-token-sum", "sequence_sum", 6),
    ],
)
def test_an_aggregation_mode(theirs: str, ours: Aggregation, factor: int) -> None:
    """The plain sum over tokens is `max_tokens` times ours."""
    losses = drawn(4, 6)
    weights = aggregation_weights(LENGTHS, ours, max_tokens=6)
    mine = factor * (weights * losses[MASK.bool()]).sum() / MASK.sum()
    torch.testing.assert_close(mine, verl_reduced(losses, MASK, theirs))


def test_kl_loss_types() -> None:
    """`k2` is k2, and `k3+` is k3_straight_through as long as its value is below 10; the gradients are always equal."""
    student, reference = -3 * drawn(200).abs(), -3 * drawn(200, seed=1).abs()
    ours = value_and_slope(lambda q, r: kl_penalty(q, r, "k2"), student, reference)
    torch.testing.assert_close(ours, value_and_slope(lambda q, r: verl_kl(q, r, "k2"), student, reference))
    value, slope = value_and_slope(lambda q, r: kl_penalty(q, r, "k3_straight_through"), student, reference)
    for kind in ("k3+", "low_var_kl+"):
        theirs, pull = value_and_slope(lambda q, r, kind=kind: verl_kl(q, r, kind), student, reference)  # type: ignore[misc]
        torch.testing.assert_close(slope, pull)
        torch.testing.assert_close(value.clamp_max(10), theirs)
    assert bool((value > 10).any())


# ── advantages ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_group_advantages() -> None:
    """Equal up to what is added to the standard deviation: 1e-6 in verl, 1e-4 here."""
    scores, groups = drawn(12), torch.arange(4).repeat_interleave(3)
    found = group_advantages(scores, groups, baseline="mean", scale="group_std", epsilon=1e-6).advantages
    torch.testing.assert_close(found, verl_grpo(scores, groups))
    usual = group_advantages(scores, groups, baseline="mean", scale="group_std").advantages
    torch.testing.assert_close(usual, verl_grpo(scores, groups), rtol=1e-3, atol=0)
    assert not torch.equal(usual, verl_grpo(scores, groups))
    plain = group_advantages(scores, groups, baseline="mean", scale="none").advantages
    torch.testing.assert_close(plain, verl_grpo(scores, groups, by_std=False))
    others = group_advantages(scores, groups, baseline="leave_one_out", scale="none").advantages
    torch.testing.assert_close(others, verl_rloo(scores, groups))


def test_a_group_of_one_has_its_score_there_and_nothing_here() -> None:
    scores, groups = torch.tensor([0.7]), torch.tensor([0])
    assert float(verl_grpo(scores, groups)) == pytest.approx(0.7, abs=1e-5)
    assert float(verl_rloo(scores, groups)) == pytest.approx(0.7)
    assert float(group_advantages(scores, groups, baseline="mean", scale="group_std").advantages) == 0.0
    assert float(group_advantages(scores, groups, baseline="none", scale="group_std").advantages) == pytest.approx(0.7)


def test_generalised_advantages_and_reinforce() -> None:
    rewards, values = drawn(4, 6) * MASK, drawn(4, 6, seed=1)
    advantages, returns = gae(acting(rewards), acting(values), discount=0.99, lam=0.95)
    theirs, expected = verl_gae(rewards, values, MASK, 0.99, 0.95)
    torch.testing.assert_close(whiten(advantages).values, theirs[MASK.bool()])
    torch.testing.assert_close(returns.values, expected[MASK.bool()])
    plain = whiten(return_to_go(acting(rewards), 0.9)).values
    torch.testing.assert_close(plain, verl_reinforce(rewards, MASK, 0.9)[MASK.bool()])


def test_the_loss_of_the_critic() -> None:
    values, old, returns = drawn(200), drawn(200, seed=1), drawn(200, seed=2)
    torch.testing.assert_close(value_loss(values, old, returns, 0.5).loss, verl_value(values, old, returns, 0.5))
