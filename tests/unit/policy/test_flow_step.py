"""Test the denoising step: its Gaussian, its log-prob, its marginals, and its errors."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutelage.policy import flow
from tutelage.policy.flow import StepKind


def parts(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, v, z = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    return x, v, z


def schedule(rows: int) -> tuple[Tensor, Tensor]:
    """Every row at another step, the first at σ = 1."""
    sigmas = torch.linspace(1.0, 0.1, rows + 1)
    return sigmas[:-1], sigmas[1:]


def test_sde_is_the_written_formula() -> None:
    x, v, z = parts((3, 2, 2), dtype=torch.float64)
    sigma, after = (s.double() for s in schedule(3))
    got = flow.step(x, v, sigma, after, kind="sde", noise_level=0.7, noise=z)
    for row in range(3):
        s, n = float(sigma[row]), float(after[row])
        dt = n - s
        spread = 0.7 * math.sqrt(s / (1 - (n if s == 1 else s)))
        mean = x[row] * (1 + spread**2 * dt / (2 * s)) + v[row] * (1 + spread**2 * (1 - s) / (2 * s)) * dt
        torch.testing.assert_close(got.mean[row], mean)
        assert float(got.std[row]) == pytest.approx(spread * math.sqrt(-dt), rel=1e-12)
        torch.testing.assert_close(got.sample[row], mean + spread * math.sqrt(-dt) * z[row])


def test_cps_is_the_written_formula_and_keeps_the_noise_at_sigma() -> None:
    x, v, z = parts((3, 2, 2), dtype=torch.float64)
    sigma, after = (s.double() for s in schedule(3))
    got = flow.step(x, v, sigma, after, kind="cps", noise_level=0.4, noise=z)
    s, n = sigma[:, None, None], after[:, None, None]
    std = n * math.sin(0.4 * math.pi / 2)
    put_back = (n**2 - std**2).sqrt()
    torch.testing.assert_close(got.mean, (x - s * v) * (1 - n) + (x + (1 - s) * v) * put_back)
    torch.testing.assert_close(got.std, std.flatten())
    torch.testing.assert_close(got.std**2 + put_back.flatten() ** 2, after**2)


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_log_prob_is_that_of_a_normal_distribution(kind: StepKind) -> None:
    x, v, z = parts((4, 3, 5, 2))
    sigma, after = schedule(4)
    got = flow.step(x, v, sigma, after, kind=kind, noise_level=0.6, noise=z)
    normal = torch.distributions.Normal(got.mean, got.std[:, None, None, None])
    assert got.log_prob is not None
    torch.testing.assert_close(got.log_prob, normal.log_prob(got.sample).mean(dim=(1, 2, 3)))
    again = flow.transition(x, v, sigma, after, kind=kind, noise_level=0.6)
    assert torch.equal(flow.log_prob(got.sample, again.mean, again.std), got.log_prob)


@pytest.mark.parametrize("kind", ["ode", "sde", "cps"])
def test_without_noise_it_is_the_euler_step_of_diffusers(kind: StepKind) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    x, v, _ = parts((2, 3, 4, 4))
    for i, timestep in enumerate(scheduler.timesteps):
        sigma, after = scheduler.sigmas[i].expand(2), scheduler.sigmas[i + 1].expand(2)
        got = flow.step(x, v, sigma, after, kind=kind)
        expected = scheduler.step(v, timestep, x, return_dict=False)[0]
        torch.testing.assert_close(got.sample, expected, rtol=0, atol=0 if kind != "cps" else 2e-6)
        assert got.log_prob is None
        assert not got.std.any()
        x = expected


WEIGHTS, MEANS, SPREADS = (torch.tensor(v, dtype=torch.float64) for v in ([0.3, 0.7], [-1.5, 0.8], [0.25, 0.4]))


def mixture_velocity(x: Tensor, sigma: float) -> Tensor:
    """E[noise − data | x_σ = x] for the 1-D Gaussian mixture."""
    variance = (1 - sigma) ** 2 * SPREADS**2 + sigma**2
    away = x[:, None] - (1 - sigma) * MEANS
    share = (WEIGHTS.log() - 0.5 * variance.log() - away**2 / (2 * variance)).softmax(dim=1)
    return (share * (sigma / variance * away - MEANS - (1 - sigma) * SPREADS**2 / variance * away)).sum(dim=1)


def endpoints(kind: StepKind, level: float, steps: int = 100, rows: int = 40_000) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    # Quantiles instead of draws at the start: the error that remains is the step's own.
    x = torch.special.ndtri((torch.arange(rows, dtype=torch.float64) + 0.5) / rows)
    sigmas = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64).tolist()
    for i, (sigma, after) in enumerate(pairwise(sigmas)):
        last = i == steps - 1
        noise = None if last or kind == "ode" else torch.randn(rows, generator=generator, dtype=torch.float64)[:, None]
        x = flow.step(
            x[:, None],
            mixture_velocity(x, sigma)[:, None],
            torch.full((rows,), sigma, dtype=torch.float64),
            torch.full((rows,), after, dtype=torch.float64),
            kind="ode" if noise is None else kind,
            noise_level=0.0 if noise is None else level,
            noise=noise,
        ).sample[:, 0]
    return x.sort().values


def exact_quantiles(rows: int) -> Tensor:
    grid = torch.linspace(-4, 4, 200_001, dtype=torch.float64)
    cdf = (WEIGHTS * torch.special.ndtr((grid[:, None] - MEANS) / SPREADS)).sum(dim=1)
    levels = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    return grid[torch.searchsorted(cdf, levels).clamp_max(len(grid) - 1)]


def test_sde_has_the_marginals_of_the_ode() -> None:
    ode, sde = endpoints("ode", 0.0), endpoints("sde", 0.7)
    assert float((sde - ode).abs().mean()) <= 0.015
    assert float((sde - exact_quantiles(len(sde))).abs().mean()) <= 0.015


def test_the_marginal_test_sees_a_missing_correction() -> None:
    """Noise added to Euler's step without the drift that makes up for it widens the distribution visibly."""
    rows, generator = 20_000, torch.Generator().manual_seed(5)
    x = torch.randn(rows, generator=generator, dtype=torch.float64)
    sigmas = torch.linspace(1.0, 0.0, 101, dtype=torch.float64)
    for sigma, after in pairwise(sigmas):
        here, there = sigma.expand(rows), after.expand(rows)
        drift = mixture_velocity(x, float(sigma))[:, None]
        std = flow.transition(x[:, None], drift, here, there, kind="sde", noise_level=0.7).std
        euler = flow.step(x[:, None], drift, here, there, kind="ode").sample[:, 0]
        x = euler + std * torch.randn(rows, generator=generator, dtype=torch.float64) * float(after > 0)
    assert float((x.sort().values - exact_quantiles(rows)).abs().mean()) > 0.05


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    rows=st.integers(1, 5),
    kind=st.sampled_from(["sde", "cps"]),
    seed=st.integers(0, 99),
)
def test_rows_are_independent_for_all_shapes(shape: list[int], rows: int, kind: StepKind, seed: int) -> None:
    x, v, z = parts((rows, *shape), seed)
    sigma, after = schedule(rows)
    level = torch.linspace(0.2, 0.9, rows)
    whole = flow.step(x, v, sigma, after, kind=kind, noise_level=level, noise=z)
    assert whole.log_prob is not None
    assert whole.sample.shape == x.shape
    assert whole.std.shape == whole.log_prob.shape == (rows,)
    for i in range(rows):
        one = slice(i, i + 1)
        alone = flow.step(x[one], v[one], sigma[one], after[one], kind=kind, noise_level=float(level[i]), noise=z[one])
        assert alone.log_prob is not None
        torch.testing.assert_close(alone.sample, whole.sample[one])
        torch.testing.assert_close(alone.log_prob, whole.log_prob[one], rtol=1e-5, atol=1e-5)


def test_mixed_rows_a_row_at_level_0_takes_the_euler_step() -> None:
    x, v, _ = parts((2, 3))
    sigma, after = schedule(2)
    got = flow.transition(x, v, sigma, after, kind="sde", noise_level=torch.tensor([0.0, 0.5]))
    assert torch.equal(got.mean[0], x[0] + v[0] * (after[0] - sigma[0]))
    assert got.std[0] == 0
    assert got.std[1] > 0


def test_a_bfloat16_velocity_is_computed_with_in_float32() -> None:
    x, v, z = parts((2, 3))
    sigma, after = schedule(2)
    got = flow.step(x, v.bfloat16(), sigma, after, kind="sde", noise_level=0.7, noise=z)
    same = flow.step(x, v.bfloat16().float(), sigma, after, kind="sde", noise_level=0.7, noise=z)
    assert got.sample.dtype == torch.float32
    assert torch.equal(got.sample, same.sample)


def test_refusals_say_why() -> None:
    x, v, z = parts((2, 3))
    sigma, after = schedule(2)
    with pytest.raises(ValueError, match=r"row 0 took a deterministic step .* has no log-prob: set a noise level"):
        flow.step(x, v, sigma, after, kind="sde", noise_level=0.0, noise=z)
    with pytest.raises(ValueError, match=r"row 1 took a deterministic step"):
        flow.log_prob(x, x, torch.tensor([0.1, 0.0]))
    with pytest.raises(ValueError, match="pass noise"):
        flow.step(x, v, sigma, after, kind="sde", noise_level=0.7)
    with pytest.raises(ValueError, match=r"latents are torch.bfloat16, expected torch.float32"):
        flow.step(x.bfloat16(), v, sigma, after, kind="ode")
    with pytest.raises(ValueError, match=r"latents are torch.float16"):
        flow.log_prob(x.half(), x, torch.tensor([0.1, 0.1]))
    with pytest.raises(ValueError, match=r"noise level 1.2 is out of range: cps takes 0 to 1"):
        flow.transition(x, v, sigma, after, kind="cps", noise_level=1.2)
    with pytest.raises(ValueError, match=r"ode takes none"):
        flow.transition(x, v, sigma, after, kind="ode", noise_level=0.5)
    with pytest.raises(ValueError, match=r"noise level -0.5"):
        flow.transition(x, v, sigma, after, kind="sde", noise_level=-0.5)
    with pytest.raises(ValueError, match="one value for each of the 2 rows"):
        flow.transition(x, v, sigma[0], after, kind="ode")


@given(steps=st.integers(2, 30), seed=st.integers(0, 1000), data=st.data())
def test_a_window_stays_in_its_range_and_off_the_last_step(steps: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, steps - 1))
    got = flow.window(steps, size, seed)
    assert len(got) == size
    assert got.start >= 0
    assert got.stop <= steps - 1
    assert got == flow.window(steps, size, seed)


def test_windows_move_over_the_whole_range() -> None:
    assert {flow.window(10, 2, seed, (1, 5)).start for seed in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("steps", "size", "within", "why"),
    [
        (10, 2, (0, 10), r"steps \[0, 10\) lies outside of the 10 steps"),
        (10, 2, (-1, 5), "lies outside"),
        (10, 2, (5, 5), "lies outside"),
        (1, 1, None, "lies outside of the 1 steps"),
        (10, 6, (0, 5), r"a window of 6 steps does not fit into steps \[0, 5\): choose 1 to 5"),
        (10, 0, None, "a window of 0 steps"),
    ],
)
def test_windows_outside_the_steps_are_refused(steps: int, size: int, within: tuple[int, int] | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        flow.window(steps, size, 0, within)
