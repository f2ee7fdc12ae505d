"""Test the parts of the policy gradient and the critic's loss against formulas, enumeration and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tutelage.algorithms.policy import ClippedLoss, PolicySettings
from tutelage.losses.contract import ModelOut
from tutelage.losses.distillation import FLOOR
from tutelage.losses.policy_gradient import (
    LOG_RATIO_LIMIT,
    ImportanceMode,
    KlEstimator,
    clipped,
    dual_clip,
    importance_weight,
    kl_penalty,
)
from tutelage.losses.value import value_loss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return gradient


# ── the clip ─────────────────────────────────────────────────────────────────────────────────────────────────────────

advantage_of = st.floats(-3, 3).filter(lambda a: a == 0 or abs(a) > 1e-3)
width = st.floats(0.01, 0.9)
bound = st.one_of(st.none(), st.floats(2.0, 20.0))


def scalar_clip(
    ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float, bool, bool]:
    """Loss, its derivative by the ratio, clipped, dual clipped: by cases."""
    if advantage > 0 and ratio > 1 + high:
        return -advantage * (1 + high), 0.0, True, False
    if advantage < 0 and ratio < 1 - low:
        return -advantage * (1 - low), 0.0, True, False
    if advantage < 0 and dual is not None and ratio > dual:
        return -advantage * dual, 0.0, False, True
    return -advantage * ratio, -advantage, False, False


@given(log_ratio=st.floats(-5, 5), old=st.floats(-10, 0), advantage=advantage_of, low=width, high=width, dual=bound)
def test_clipped_against_a_scalar_reference(
    log_ratio: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> None:
    ratio = math.exp((log_ratio + old) - old)
    assume(all(abs(ratio - kink) > 1e-6 for kink in (1 - low, 1 + high, dual or 0.0)))
    loss, derivative, cut, over = scalar_clip(ratio, advantage, low, high, dual)

    def of(logp: Tensor) -> Tensor:
        return clipped(logp, f64(old), f64(advantage), clip_low=low, clip_high=high, dual=dual).loss

    found = clipped(f64(log_ratio + old), f64(old), f64(advantage), clip_low=low, clip_high=high, dual=dual)
    assert float(found.loss) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert float(slope(of, f64(log_ratio + old))) == pytest.approx(derivative * ratio, rel=1e-9, abs=1e-12)
    assert (bool(found.clipped), bool(found.dual_clipped), bool(found.overflowed)) == (cut, over, False)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clipped_by_finite_differences_and_its_flags(dual: float | None) -> None:
    """Where no flag is set and the advantage is not 0 there is a gradient, and nowhere else."""
    log_ratio = torch.linspace(-24.03, 24.03, 199, dtype=torch.float64).repeat(2)
    advantage = f64(-1.0, 1.0).repeat_interleave(199)
    old = torch.linspace(-3, -1, 398, dtype=torch.float64)

    def of(logp: Tensor) -> Tensor:
        return clipped(logp, old, advantage, clip_low=0.2, clip_high=0.4, dual=dual).loss

    out = clipped(old + log_ratio, old, advantage, clip_low=0.2, clip_high=0.4, dual=dual)
    gradient = slope(of, old + log_ratio)
    assert torch.equal(gradient == 0, out.clipped | out.dual_clipped | out.overflowed)
    assert torch.equal(out.overflowed, log_ratio.abs() > LOG_RATIO_LIMIT)
    assert bool(out.dual_clipped.any()) == (dual is not None)
    step = 1e-6
    difference = (of(old + log_ratio + step) - of(old + log_ratio - step)) / (2 * step)
    torch.testing.assert_close(gradient, difference, rtol=1e-4, atol=1e-6)


def test_clip_higher_leaves_more_room_above() -> None:
    logp, old = f64(1.25, 0.75, 1.35).log(), torch.zeros(3, dtype=torch.float64)
    advantage = f64(1.0, -1.0, 1.0)
    wide = clipped(logp, old, advantage, clip_low=0.2, clip_high=0.3, dual=None)
    assert wide.clipped.tolist() == [False, True, True]
    torch.testing.assert_close(wide.loss, f64(-1.25, 0.8, -1.3))
    narrow = clipped(logp, old, advantage, clip_low=0.3, clip_high=0.2, dual=None)
    assert narrow.clipped.tolist() == [True, False, True]
    torch.testing.assert_close(narrow.loss, f64(-1.2, 0.75, -1.2))


def test_the_first_update_is_the_plain_policy_gradient() -> None:
    logp, advantage = f64(-0.1, -2.0, -7.0), f64(2.0, -3.0, 0.0)

    def of(leaf: Tensor) -> Tensor:
        return clipped(leaf, logp, advantage, clip_low=0.2, clip_high=0.2, dual=3.0).loss

    assert torch.equal(slope(of, logp), -advantage)


def test_dual_clip_is_the_symmetric_case() -> None:
    logp, old = torch.linspace(-3, 3, 31), torch.zeros(31)
    advantage = torch.tensor([-1.0, 1.0, 0.5]).repeat(11)[:31]
    found = dual_clip(logp, old, advantage, 0.2, 3.0)
    expected = clipped(logp, old, advantage, clip_low=0.2, clip_high=0.2, dual=3.0)
    assert all(torch.equal(a, b) for a, b in zip(astuple(found), astuple(expected), strict=True))


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("old", [-math.inf, -1e30, -200.0, 200.0, math.inf])
def test_an_infinite_ratio_is_ordinary(old: float, advantage: float, dual: float | None) -> None:
    """In float32, where e^200 would be infinite and 0 · ∞ not a number."""

    def run(leaf: Tensor) -> Tensor:
        return clipped(
            leaf, torch.tensor([old]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2, dual=dual
        ).loss

    logp = torch.tensor([-1.0])
    assert bool(torch.isfinite(run(logp)).all())
    assert float(slope(run, logp)) == 0.0
    found = clipped(logp, torch.tensor([old]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2, dual=dual)
    assert bool(found.overflowed)
    limit = LOG_RATIO_LIMIT if old < 0 else -LOG_RATIO_LIMIT
    expected, _, cut, over = scalar_clip(math.exp(limit), advantage, 0.2, 0.2, dual)
    assert float(found.loss) == pytest.approx(expected, rel=1e-5)
    assert (bool(found.clipped), bool(found.dual_clipped)) == (cut, over)


# ── sampler and learner ──────────────────────────────────────────────────────────────────────────────────────────────


@given(
    pairs=st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0)), max_size=8),
    cap=st.floats(1.0, 10.0),
    mode=st.sampled_from(get_args(ImportanceMode)),
)
def test_importance_weight_against_a_loop(pairs: list[tuple[float, float]], cap: float, mode: ImportanceMode) -> None:
    ratios = [math.exp(learner - behaviour) for learner, behaviour in pairs]
    assume(all(abs(r / edge - 1) > 1e-9 for r in ratios for edge in (cap, 1 / cap) if r != 1.0))
    found = importance_weight(f64(*(p for p, _ in pairs)), f64(*(b for _, b in pairs)), mode=mode, cap=cap)
    weights = {
        "off": [1.0 for _ in ratios],
        "truncate": [min(r, cap) for r in ratios],
        "mask": [r if 1 / cap <= r <= cap else 0.0 for r in ratios],
    }[mode]
    cut = {
        "off": [False for _ in ratios],
        "truncate": [r > cap for r in ratios],
        "mask": [not 1 / cap <= r <= cap for r in ratios],
    }[mode]
    torch.testing.assert_close(found.weight, f64(*weights))
    assert found.cut.tolist() == cut


@pytest.mark.parametrize("mode", get_args(ImportanceMode))
def test_importance_weights_are_held_fixed_and_finite(mode: ImportanceMode) -> None:
    learner = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    found = importance_weight(learner, torch.tensor([-math.inf, -1.0, 200.0]), mode=mode, cap=2.0)
    assert not found.weight.requires_grad
    expected = {"off": [1.0, 1.0, 1.0], "truncate": [2.0, 1.0, 0.0], "mask": [0.0, 1.0, 0.0]}[mode]
    assert found.weight.tolist() == pytest.approx(expected, abs=1e-8)
    assert (
        found.cut.tolist() == {"off": [False] * 3, "truncate": [True, False, False], "mask": [True, False, True]}[mode]
    )


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("mode", "cap"), [("truncate", 1.5), ("mask", 1.5), ("truncate", 1e6), ("off", 2.0)])
def test_a_loss_is_weighed_from_the_sampler_to_the_weights_before_the_updates(
    mode: ImportanceMode, cap: float, several: bool
) -> None:
    """Of logp (now), old_logp (before the updates) and behaviour_logp (the sampler), each ratio takes its own two."""
    logits = torch.tensor([[0.3, -0.2], [0.1, 0.9], [-1.0, 0.5], [0.2, 0.2]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 0, 1])
    columns = {
        "old_logp": torch.tensor([-0.6, -0.5, -1.5, -0.8], dtype=torch.float64),
        "behaviour_logp": torch.tensor([-0.9, -0.3, -2.5, -0.4], dtype=torch.float64),
        "reference_logp": torch.tensor([-0.2, -1.5, -0.7, -0.3], dtype=torch.float64),
        "task_advantage": torch.tensor([1.0, -0.5, 0.7, 2.0], dtype=torch.float64),
    }
    policy = PolicySettings(
        clip_low=0.99, clip_high=1e6, dual_clip=None, importance=mode, importance_cap=cap, kl=0.3, kl_estimator="k2",
        several_updates=several,
    )  # fmt: skip
    loss = ClippedLoss(policy, advantage="task_advantage", name="policy")
    (found,) = torch.autograd.grad(loss(ModelOut(logits, ids, lambda h: h, 1.0), columns).total, logits)
    logp = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    before = columns["old_logp"] if policy.needs_old_logp else columns["behaviour_logp"]
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        ratio = math.exp(float(before[i]) - float(columns["behaviour_logp"][i]))
        weight = {"off": 1.0, "truncate": min(ratio, cap), "mask": ratio if 1 / cap <= ratio <= cap else 0.0}[mode]
        now = math.exp(float(logp[i].detach()) - float(before[i])) if several else 1.0
        pull = (logp[i] - columns["reference_logp"][i]) ** 2 / 2
        expected = expected - weight * (logp[i] - before[i]).exp() * columns["task_advantage"][i]
        expected = expected + 0.3 * weight * now * pull
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted)


def test_truncated_weights_undo_the_sampler() -> None:
    """Under a generous cap, the weighted mean over the sampler's draws is the mean over the learner's."""
    learner, sampler = f64(0.5, 0.3, 0.2), f64(0.2, 0.3, 0.5)
    worth = f64(1.0, -2.0, 4.0)
    weight = importance_weight(learner.log(), sampler.log(), mode="truncate", cap=10.0).weight
    torch.testing.assert_close((sampler * weight * worth).sum(), (learner * worth).sum())


# ── the pull to a reference ──────────────────────────────────────────────────────────────────────────────────────────

STUDENT, REFERENCE = f64(0.4, -1.0, 2.0, 0.1, -0.3), f64(-0.5, 1.2, 0.3, 0.0, 0.8).log_softmax(-1)


def exact(student: Tensor, reference: Tensor) -> Tensor:
    """KL(student‖reference) from logits and log-probs."""
    logp = student.log_softmax(-1)
    return (logp.exp() * (logp - reference)).sum()


def mean_of(estimator: KlEstimator) -> tuple[float, Tensor]:
    """Mean value and mean gradient by the logits, over every token that the student can draw, weights held fixed."""
    leaf = STUDENT.clone().requires_grad_()
    logp = leaf.log_softmax(-1)
    mean = (logp.exp().detach() * kl_penalty(logp, REFERENCE, estimator)).sum()
    (gradient,) = torch.autograd.grad(mean, leaf)
    return float(mean.detach()), gradient


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_straight_through"])
def test_the_mean_value_is_the_kl(estimator: KlEstimator) -> None:
    assert mean_of(estimator)[0] == pytest.approx(float(exact(STUDENT, REFERENCE)), rel=1e-12)


def test_the_mean_gradient_is_the_one_that_is_documented() -> None:
    reverse = slope(lambda student: exact(student, REFERENCE), STUDENT)
    forward = slope(lambda student: -(REFERENCE.exp() * student.log_softmax(-1)).sum(), STUDENT)
    assert float((reverse - forward).abs().max()) > 1e-2
    assert float(mean_of("k1")[1].abs().max()) < 1e-12
    torch.testing.assert_close(mean_of("k2")[1], reverse)
    torch.testing.assert_close(mean_of("k3")[1], forward)
    torch.testing.assert_close(mean_of("k3_straight_through")[1], reverse)


@given(logp=st.floats(-20, 0), ref=st.floats(-20, 0))
def test_estimators_against_scalar_formulas(logp: float, ref: float) -> None:
    d = logp - ref
    values = {"k1": d, "k2": d * d / 2, "k3": math.expm1(-d) + d, "k3_straight_through": math.expm1(-d) + d}
    slopes = {"k1": 1.0, "k2": d, "k3": -math.expm1(-d), "k3_straight_through": d}
    for estimator in get_args(KlEstimator):

        def of(leaf: Tensor, estimator: KlEstimator = estimator) -> Tensor:
            return kl_penalty(leaf, f64(ref), estimator)

        assert float(of(f64(logp))) == pytest.approx(values[estimator], rel=1e-9, abs=1e-12)
        assert float(slope(of, f64(logp))) == pytest.approx(slopes[estimator], rel=1e-9, abs=1e-12)


def test_a_straight_through_value_is_that_of_k3_to_the_bit() -> None:
    logp, ref = -torch.rand(200) * 30, -torch.rand(200) * 30
    assert torch.equal(kl_penalty(logp, ref, "k3_straight_through"), kl_penalty(logp, ref, "k3"))


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
@pytest.mark.parametrize(("logp", "ref"), [(-1.0, -math.inf), (-1e4, -0.1), (0.0, -1e4), (-1.0, -1.0)])
def test_penalties_are_finite(estimator: KlEstimator, logp: float, ref: float) -> None:
    def of(leaf: Tensor) -> Tensor:
        return kl_penalty(leaf, torch.tensor([ref]), estimator)

    value, gradient = float(of(torch.tensor([logp]))), float(slope(of, torch.tensor([logp])))
    assert math.isfinite(value)
    assert math.isfinite(gradient)
    if logp == ref:
        assert value == 0.0
        assert gradient == (1.0 if estimator == "k1" else 0.0)
    elif ref == -math.inf and estimator == "k1":
        assert value == pytest.approx(-1.0 - FLOOR)


# ── the critic ───────────────────────────────────────────────────────────────────────────────────────────────────────

level = st.floats(-5, 5, width=32)


@given(value=level, old=level, target=level, clip=st.one_of(st.none(), st.floats(0.05, 2.0)))
def test_value_loss_against_a_scalar_reference(value: float, old: float, target: float, clip: float | None) -> None:
    near = value if clip is None else min(max(value, old - clip), old + clip)
    plain, bounded = (value - target) ** 2 / 2, (near - target) ** 2 / 2
    assume(plain == bounded or abs(plain - bounded) > 1e-9)
    cut = bounded > plain

    def of(leaf: Tensor) -> Tensor:
        return value_loss(leaf, f64(old), f64(target), clip).loss

    found = value_loss(f64(value), f64(old), f64(target), clip)
    assert float(found.loss) == pytest.approx(max(plain, bounded), rel=1e-12)
    assert bool(found.clipped) == cut
    assert float(slope(of, f64(value))) == pytest.approx(0.0 if cut else value - target, rel=1e-12)


def test_value_loss_by_cases() -> None:
    values, old = f64(0.1, 0.9, -0.9, 0.9), torch.zeros(4, dtype=torch.float64)
    returns = f64(2.0, 2.0, 2.0, 0.7)  # near; too far towards it; too far away from it; past it
    found = value_loss(values, old, returns, 0.2)
    assert found.clipped.tolist() == [False, True, False, True]
    torch.testing.assert_close(found.loss, f64(1.9**2, 1.8**2, 2.9**2, 0.5**2) / 2)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2).loss, values.requires_grad_())


def test_rounding_does_not_count_as_a_clip() -> None:
    generator = torch.Generator().manual_seed(0)
    old, noise, returns = torch.randn(3, 500, generator=generator).unbind()
    found = value_loss(0.01 * noise, old, returns, 10.0)
    assert not bool(found.clipped.any())


def test_nothing_in_nothing_out() -> None:
    none = torch.zeros(0)
    assert clipped(none, none, none, clip_low=0.2, clip_high=0.2, dual=3.0).loss.shape == (0,)
    assert value_loss(none, none, none, 0.2).loss.shape == (0,)
    for mode in get_args(ImportanceMode):
        assert importance_weight(none, none, mode=mode, cap=2.0).weight.shape == (0,)
    for estimator in get_args(KlEstimator):
        assert kl_penalty(none, none, estimator).shape == (0,)
