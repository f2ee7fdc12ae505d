"""Losses of denoising steps. Each row is one sample at one of its trained steps.

Means, velocities and targets are [rows, …]; log-probs, advantages, sigma and std are [rows]. `std` is the standard
deviation of the whole step (s√|dt| for sde), as returned by `policy.flow.transition`. Results are [rows].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tutelage.losses import policy_gradient
from tutelage.losses.policy_gradient import Clipped
from tutelage.policy import flow

SMALLEST_ERROR = 1e-5
"""Lower bound of the mean error that the NFT loss divides by."""


@dataclass(frozen=True)
class FlowOut:
    """The student's outputs at some trained steps, one per row. Means and log-probs are computed on first access."""

    velocity: Tensor
    """[rows, …], with gradient"""
    latents: Tensor
    targets: Tensor
    """the latents after each step; for the forward process, noise minus data"""
    sigma: Tensor
    sigma_next: Tensor
    kind: flow.StepKind
    noise_level: float
    reference_velocity: Callable[[], Tensor]
    """computes the velocity of the model before training, without gradient"""

    @cached_property
    def step(self) -> flow.Transition:
        return self._transition(self.velocity)

    @property
    def mean(self) -> Tensor:
        return self.step.mean

    @property
    def std(self) -> Tensor:
        return self.step.std

    @cached_property
    def logp(self) -> Tensor:
        """[rows]: log-prob of each step that was taken"""
        return flow.log_prob(self.targets, self.mean, self.std)

    @cached_property
    def reference_mean(self) -> Tensor:
        return self._transition(self.reference_velocity()).mean

    def _transition(self, velocity: Tensor) -> flow.Transition:
        return flow.transition(
            self.latents, velocity, self.sigma, self.sigma_next, kind=self.kind, noise_level=self.noise_level
        )


def flow_grpo(log_ratio: Tensor, advantage: Tensor, clip: float) -> Clipped:
    """Compute max(−A·ρ, −A·clip(ρ, 1 ± clip)) with ρ = e^log_ratio.

    The log-ratio is log p − log p_old, or `guarded_log_ratio` for GRPO-Guard. Log-probs are means over the dimensions
    of the latents, so a suitable `clip` shrinks as latents grow: 1e-4 at 65,536 dimensions, 3e-3 at 64.
    """
    return policy_gradient.clipped(
        log_ratio, torch.zeros_like(log_ratio), advantage, clip_low=clip, clip_high=clip, dual=None
    )


def guarded_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """Compute the log-ratio of GRPO-Guard: (log p − log p_old + b)·std with b = mean (μ − μ_old)²/2std².

    A sample of the old policy is x = μ_old + std·z, so log p − log p_old = −b + mean z(μ − μ_old)/std. This is below 0
    on average, and its spread is larger at steps with little noise, so the clip acts mostly on one side. The guarded
    log-ratio is mean z(μ − μ_old), which is centred at 0 and has the same scale at all steps.
    """
    return (log_prob - old_log_prob + step_kl(mean, old_mean, std)) * std


def step_kl(mean: Tensor, target_mean: Tensor, std: Tensor) -> Tensor:
    """Compute mean (μ − μ_target)²/2std²: the KL between two steps with the same noise, averaged over dimensions.

    With the mean of a reference it is a penalty; with the mean of a teacher it distils step by step.
    """
    return _mean((mean - target_mean) ** 2) / (2 * std**2)


def optimality(advantage: Tensor, limit: float) -> Tensor:
    """Compute the weight r = ½ + ½·clip(A/limit, ±1) of `diffusion_nft`: 1 for the best samples, 0 for the worst."""
    return 0.5 + 0.5 * (advantage / limit).clamp(-1, 1)


def diffusion_nft(
    velocity: Tensor, old_velocity: Tensor, target: Tensor, sigma: Tensor, weight: Tensor, beta: float
) -> Tensor:
    """Compute the DiffusionNFT loss: flow matching towards good samples of the policy and away from bad ones.

        (r·d(v⁺) + (1 − r)·d(v⁻))/β,   v⁺ = (1 − β)v_old + βv,   v⁻ = (1 + β)v_old − βv

    r is the `weight` in [0, 1]. `target` is noise − data at x_σ = (1 − σ)·data + σ·noise, with fresh noise. d is the
    squared error of the data x̂ = x_σ − σv that a velocity implies, divided by its detached mean absolute error:
    d(v) = mean (x̂ − data)²/mean |x̂ − data|. Dividing by β keeps the scale of the gradient independent of β.
    """
    toward = (1 - beta) * old_velocity + beta * velocity
    away = (1 + beta) * old_velocity - beta * velocity
    return (weight * _data_error(toward, target, sigma) + (1 - weight) * _data_error(away, target, sigma)) / beta


def _data_error(velocity: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """Compute d(v). As x̂ − data = −σ(v − target), the data itself is not needed."""
    error = velocity - target
    size = (sigma * _mean(error.detach().abs())).clamp_min(SMALLEST_ERROR)
    return sigma**2 * _mean(error**2) / size


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)
