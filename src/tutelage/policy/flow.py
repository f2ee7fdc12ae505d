"""Computations that sampler and learner share for diffusion: a denoising step as a Gaussian, its sample and log-prob.

Convention: x_σ = (1 − σ)·data + σ·noise, velocity = noise − data, σ falls from 1 to 0, dt = σ′ − σ < 0.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from tutelage.policy.text import wide

StepKind = Literal["sde", "cps", "ode"]


@dataclass(frozen=True, slots=True)
class Transition:
    """The distribution of the next latents: Gaussian, independent in every dimension."""

    mean: Tensor
    """float32 like the latents"""
    std: Tensor
    """float32 [rows]; 0 where the step is deterministic"""


@dataclass(frozen=True, slots=True)
class Step:
    """A transition and a sample from it."""

    mean: Tensor
    std: Tensor
    sample: Tensor
    """the next latents"""
    log_prob: Tensor | None
    """float32 [rows]; None for a deterministic step"""


def transition(
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    kind: StepKind,
    noise_level: float | Tensor = 0.0,
) -> Transition:
    """Compute the mean and standard deviation of the step from σ to σ′, in float32 whatever the model's dtype.

    latents, velocity [rows, …]; sigma, sigma_next [rows]: rows may be at different steps. `noise_level` a is one number
    or one per row; a row at level 0 takes the deterministic step, whatever the kind.

    sde   s = a·√(σ/(1 − σ)); at σ = 1 the denominator is 1 − σ′ instead, to avoid dividing by 0;
          mean = x(1 + s²dt/2σ) + v(1 + s²(1 − σ)/2σ)dt, std = s√|dt|. Has the marginals of the ODE.
    cps   std = σ′·sin(aπ/2); mean = (1 − σ′)(x − σv) + σ′·cos(aπ/2)·(x + (1 − σ)v). As much noise is added as is
          removed, so the total noise in x′ is σ′. Its marginals are not those of the ODE.
    ode   mean = x + v·dt, std = 0: Euler's step.
    """
    x = _checked(latents, velocity, sigma, sigma_next)
    level = _checked_level(noise_level, kind, x)
    v, here, there = velocity.to(x.dtype), _per_row(sigma, x), _per_row(sigma_next, x)
    dt = there - here
    if kind == "ode":
        return Transition(x + v * dt, torch.zeros_like(sigma, dtype=x.dtype))
    if kind == "sde":
        spread = level**2 * here / (1 - torch.where(here == 1, there, here))
        mean = x * (1 + spread * dt / (2 * here)) + v * (1 + spread * (1 - here) / (2 * here)) * dt
        return Transition(mean, (spread * -dt).sqrt().flatten())
    if kind == "cps":
        data, noise = x - here * v, x + (1 - here) * v
        angle = level * (math.pi / 2)
        return Transition(data * (1 - there) + noise * there * angle.cos(), (there * angle.sin()).flatten())
    assert_never(kind)


def log_prob(sample: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return [rows]: the log-density of `sample` under a transition, as the mean (not the sum) over dimensions.

    The mean keeps the scale of log-ratios independent of the size of the latents. std [rows] must be above 0.
    """
    if bool((std <= 0).any()):
        row = int((std <= 0).nonzero()[0])
        raise ValueError(
            f"row {row} took a deterministic step (standard deviation 0), which has no log-prob: set a noise level "
            "above 0 for trained steps, or do not ask for log-probs; the last step of cps is always deterministic"
        )
    _refuse_half(sample)
    scale = _per_row(std, mean)
    density = -((sample - mean) ** 2) / (2 * scale**2) - scale.log() - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(dim=1)


def step(
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    kind: StepKind,
    noise_level: float | Tensor = 0.0,
    noise: Tensor | None = None,
) -> Step:
    """Take one step. A random step needs `noise`: standard normal, in the shape of the latents."""
    to = transition(latents, velocity, sigma, sigma_next, kind=kind, noise_level=noise_level)
    if noise is None:
        if bool((to.std > 0).any()):
            raise ValueError(f"a {kind} step at noise level {noise_level} draws from a Gaussian: pass noise")
        return Step(to.mean, to.std, to.mean, None)
    sample = to.mean + _per_row(to.std, to.mean) * noise.to(to.mean.dtype)
    return Step(to.mean, to.std, sample, log_prob(sample, to.mean, to.std))


def window(steps: int, size: int, seed: int, within: tuple[int, int] | None = None) -> range:
    """Choose the steps that are random and trained: `size` consecutive ones of `steps`, determined by `seed` alone.

    Call it once per iteration and share the result: training collapses if each sample has its own window. The window
    lies in the half-open range `within`, by default all steps but the last, which is never part of it.
    """
    first, end = within if within is not None else (0, steps - 1)
    if not 0 <= first < end <= steps - 1:
        raise ValueError(
            f"a window within steps [{first}, {end}) lies outside of the {steps} steps: choose a range inside "
            f"[0, {steps - 1}); the last step is never part of it"
        )
    if not 1 <= size <= end - first:
        raise ValueError(
            f"a window of {size} steps does not fit into steps [{first}, {end}): choose 1 to {end - first}"
        )
    start = random.Random(seed).randint(first, end - size)
    return range(start, start + size)


def _checked(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    _refuse_half(latents)
    if velocity.shape != latents.shape:
        raise ValueError(f"velocity has shape {list(velocity.shape)}, latents {list(latents.shape)}")
    rows = (len(latents),)
    if sigma.shape != rows or sigma_next.shape != rows:
        raise ValueError(
            f"sigma has shape {list(sigma.shape)}, sigma_next {list(sigma_next.shape)}, expected one value for each of "
            f"the {len(latents)} rows"
        )
    return latents


def _refuse_half(latents: Tensor) -> None:
    if latents.dtype != wide(latents).dtype:
        raise ValueError(
            f"latents are {latents.dtype}, expected torch.float32: rounding them changes log-probs by more than an "
            "update does; keep them in float32 and let only the model compute in a narrower dtype"
        )


def _checked_level(noise_level: float | Tensor, kind: StepKind, like: Tensor) -> Tensor:
    level = torch.as_tensor(noise_level, dtype=like.dtype, device=like.device)
    low, high = float(level.min()), float(level.max())
    limit = {"sde": math.inf, "cps": 1.0, "ode": 0.0}[kind]
    if not (low >= 0 and high <= limit):
        raise ValueError(
            f"noise level {low if low < 0 else high:g} is out of range: {kind} takes "
            + {"sde": "0 or more", "cps": "0 to 1", "ode": "none (0), because it is deterministic"}[kind]
        )
    return _per_row(level, like) if level.ndim else level


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    """Reshape [rows] to [rows, 1, …], in the dtype and on the device of `like`."""
    return values.to(like).reshape(-1, *[1] * (like.ndim - 1))
