"""Test the losses of a denoising step against explicit formulas and finite differences."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from repository import ROOT
from tutelage.losses import flow as losses
from tutelage.policy import flow


def doubles(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STD = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.5, -0.5, 0.25], dtype=torch.float64)


def test_clipped_loss_is_the_written_formula_for_each_row() -> None:
    log_ratio = torch.tensor([0.0, 0.01, -0.01, 0.01, -0.01], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    got = losses.flow_grpo(log_ratio, advantage, clip=3e-3)
    for row in range(5):
        ratio, a = math.exp(log_ratio.tolist()[row]), float(advantage[row])
        assert got.loss.tolist()[row] == pytest.approx(max(-a * ratio, -a * min(max(ratio, 0.997), 1.003)), rel=1e-12)
    assert got.clipped.tolist() == [False, True, False, False, True]
    (gradient,) = torch.autograd.grad(got.loss.sum(), log_ratio)
    assert (gradient != 0).tolist() == [True, False, True, True, False]
    assert float(gradient[0]) == -2.0


def test_ratio_is_exactly_1_when_nothing_changed() -> None:
    log_prob = torch.randn(7)
    assert torch.equal(losses.flow_grpo(log_prob - log_prob, torch.ones(7), 1e-4).loss, -torch.ones(7))


def test_step_kl_is_the_kl_of_two_normals_and_0_for_the_same_mean() -> None:
    mean, target = doubles(3, 2, 4, seed=0), doubles(3, 2, 4, seed=1)
    wide = STD[:, None, None]
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, wide), torch.distributions.Normal(target, wide)
    )
    torch.testing.assert_close(losses.step_kl(mean, target, STD), exact.mean(dim=(1, 2)))
    assert not losses.step_kl(mean, mean.clone(), STD).any()
    assert gradcheck(lambda m: losses.step_kl(m, target, STD), (mean.clone().requires_grad_(),))


def test_step_kl_of_an_sde_step_is_the_formula_with_dt() -> None:
    x, v, ref = (doubles(2, 5, seed=seed) for seed in range(3))
    sigma, after = torch.tensor([0.8, 0.5], dtype=torch.float64), torch.tensor([0.7, 0.3], dtype=torch.float64)
    student = flow.transition(x, v, sigma, after, kind="sde", noise_level=0.7)
    reference = flow.transition(x, ref, sigma, after, kind="sde", noise_level=0.7)
    s = 0.7 * (sigma / (1 - sigma)).sqrt()
    expected = ((student.mean - reference.mean) ** 2).mean(dim=1) / (2 * s**2 * (sigma - after))
    torch.testing.assert_close(losses.step_kl(student.mean, reference.mean, student.std), expected)


PAGE = ROOT / "docs" / "diffusion.md"


def trained(steps: int, shift: float = 1.0) -> tuple[Tensor, Tensor]:
    """σ before and after each step of a schedule but the last, which is never trained."""
    even = [1 - i / steps for i in range(steps + 1)]
    sigmas = [shift * u / (1 + (shift - 1) * u) for u in even]
    before, after = zip(*pairwise(sigmas[:-1]), strict=True)
    return torch.tensor(before, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)


def factors(kind: flow.StepKind, sigma: Tensor, after: Tensor, level: float = 0.7) -> tuple[Tensor, Tensor]:
    """Ours over published, at each step: the KL to a reference, and the log-ratio of a sample."""
    x, v, other, z = (doubles(len(sigma), 5, seed=seed) for seed in range(4))
    ours, reference = (flow.transition(x, each, sigma, after, kind=kind, noise_level=level) for each in (v, other))
    sample = reference.mean + reference.std[:, None] * z
    squares = [((sample - step.mean) ** 2).mean(dim=1) for step in (ours, reference)]
    distance = ((ours.mean - reference.mean) ** 2).mean(dim=1)
    if kind == "sde":
        s = level * (sigma / (1 - torch.where(sigma == 1, after, sigma))).sqrt()
        kl, spread = distance / (2 * s**2), 2 * (s * (sigma - after).sqrt()) ** 2
    else:
        std = after * math.sin(level * math.pi / 2)
        kl, spread = distance / (2 * std**2), torch.ones_like(std)
    log_ratio = (squares[1] - squares[0]) / spread
    mine = flow.log_prob(sample, ours.mean, ours.std) - flow.log_prob(sample, reference.mean, reference.std)
    return losses.step_kl(ours.mean, reference.mean, ours.std) / kl, mine / log_ratio


def test_published_settings_carry_over_by_the_factors_of_the_docs() -> None:
    """The published formulas are written out here; what the page says of them is computed."""
    page = " ".join(PAGE.read_text().split())
    one = torch.ones(7, dtype=torch.float64)
    kl, log_ratio = factors("sde", *trained(8))
    torch.testing.assert_close(kl, 8 * one)
    torch.testing.assert_close(log_ratio, one)
    assert f"the KL here is {kl[0]:.0f} times as large: `beta` 0.04 becomes `kl: {0.04 / float(kl[0]):g}`" in page
    kl, log_ratio = factors("sde", *trained(10, shift=3.0))
    torch.testing.assert_close(log_ratio, torch.ones(9, dtype=torch.float64))
    assert f"it falls from {kl[0]:.0f} at the first step to {kl[-1]:.1f} at the last trained one" in page
    assert kl.tolist() == sorted(kl.tolist(), reverse=True)
    kl, log_ratio = factors("cps", *trained(8))
    torch.testing.assert_close(kl, one)
    first, last = float(log_ratio[0]), float(log_ratio[-1])
    assert f"rises from {first:.2f} at the first step to {last:.0f} at the last trained one" in page
    assert f"`clip_range` 1e-4 becomes {1e-4 * first:.1e} at the first".replace("e-05", "e-5") in page
    assert f"and {1e-4 * last:.1e} at the last,".replace("e-03", "e-3") in page
    assert log_ratio.tolist() == sorted(log_ratio.tolist())


def test_guarded_log_ratio_is_the_formula_and_what_is_left_is_centred() -> None:
    mean, old_mean, noise = doubles(3, 6, seed=0), doubles(3, 6, seed=1), doubles(3, 6, seed=2)
    sample = old_mean + STD[:, None] * noise
    log_prob, old = flow.log_prob(sample, mean, STD), flow.log_prob(sample, old_mean, STD)
    got = losses.guarded_log_ratio(log_prob, old, mean, old_mean, STD)
    b = ((mean - old_mean) ** 2).mean(dim=1) / (2 * STD**2)
    torch.testing.assert_close(got, (log_prob - old + b) * STD)
    torch.testing.assert_close(got, (noise * (mean - old_mean)).mean(dim=1))

    def of(m: Tensor) -> Tensor:
        return losses.guarded_log_ratio(flow.log_prob(sample, m, STD), old, m, old_mean, STD)

    assert gradcheck(of, (mean.clone().requires_grad_(),))


def test_gradient_of_the_clipped_loss_through_the_step() -> None:
    x, v, noise = (doubles(3, 4, seed=seed) for seed in range(3))
    sigma, after = torch.tensor([1.0, 0.6, 0.4]).double(), torch.tensor([0.8, 0.4, 0.2]).double()
    taken = flow.step(x, v, sigma, after, kind="sde", noise_level=0.7, noise=noise)

    def of(velocity: Tensor) -> Tensor:
        now = flow.transition(x, velocity, sigma, after, kind="sde", noise_level=0.7)
        log_prob = flow.log_prob(taken.sample, now.mean, now.std)
        return losses.flow_grpo(log_prob - taken.log_prob, ADVANTAGE, clip=0.9).loss

    assert gradcheck(of, (v.clone().requires_grad_(),))


def test_diffusion_nft_is_the_written_formula_on_the_data() -> None:
    velocity, old, data, noise = (doubles(3, 2, 4, seed=seed) for seed in range(4))
    sigma = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    weight, beta = torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64), 0.4
    got = losses.diffusion_nft(velocity, old, noise - data, sigma, weight, beta)
    for row in range(3):
        s, r = float(sigma[row]), float(weight[row])
        x = (1 - s) * data[row] + s * noise[row]
        good = x - s * ((1 - beta) * old[row] + beta * velocity[row]) - data[row]
        bad = x - s * ((1 + beta) * old[row] - beta * velocity[row]) - data[row]
        expected = r * (good**2).mean() / good.abs().mean() + (1 - r) * (bad**2).mean() / bad.abs().mean()
        torch.testing.assert_close(got[row], expected / beta)


def test_diffusion_nft_gradient_holds_its_denominators_fixed() -> None:
    velocity, old, target = (doubles(3, 4, seed=seed) for seed in range(3))
    sigma, weight, beta = torch.full((3,), 0.5).double(), torch.tensor([0.9, 0.5, 0.1]).double(), 0.6
    v = velocity.clone().requires_grad_()
    (got,) = torch.autograd.grad(losses.diffusion_nft(v, old, target, sigma, weight, beta).sum(), v)
    good, bad = (1 - beta) * old + beta * velocity - target, (1 + beta) * old - beta * velocity - target
    scale_good, scale_bad = (0.5 * error.abs().mean(dim=1) for error in (good, bad))

    def frozen(at: Tensor) -> Tensor:
        toward, away = (1 - beta) * old + beta * at - target, (1 + beta) * old - beta * at - target
        first = weight * 0.25 * (toward**2).mean(dim=1) / scale_good
        return (first + (1 - weight) * 0.25 * (away**2).mean(dim=1) / scale_bad) / beta

    for index in ((0, 1), (1, 3), (2, 0)):
        shift = torch.zeros_like(velocity)
        shift[index] = 1e-6
        slope = (frozen(velocity + shift).sum() - frozen(velocity - shift).sum()) / 2e-6
        assert float(got[index]) == pytest.approx(float(slope), rel=1e-5)


def test_diffusion_nft_moves_towards_good_and_away_from_bad_samples() -> None:
    old, target = doubles(2, 4, seed=0), doubles(2, 4, seed=1)
    v = old.clone().requires_grad_()
    weight = torch.tensor([1.0, 0.0], dtype=torch.float64)
    losses.diffusion_nft(v, old, target, torch.full((2,), 0.5).double(), weight, 1.0).sum().backward()
    assert v.grad is not None
    descent = -(v.grad * (target - old)).sum(dim=1)
    assert descent[0] > 0 > descent[1]


def test_diffusion_nft_is_0_and_finite_where_the_student_is_right() -> None:
    target = doubles(2, 4, seed=0)
    v = target.clone().requires_grad_()
    loss = losses.diffusion_nft(v, target, target, torch.full((2,), 0.5).double(), torch.full((2,), 0.5).double(), 0.5)
    loss.sum().backward()
    assert float(loss.detach().abs().max()) < 1e-20
    assert v.grad is not None
    assert float(v.grad.abs().max()) < 1e-9


def test_optimality_is_clipped_to_0_and_1() -> None:
    assert losses.optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 7.0]), 5.0).tolist() == [0.0, 0.0, 0.5, 0.75, 1.0]
