"""Algorithms for diffusion models: FlowGRPO, with or without guard, DiffusionNFT, and step-by-step distillation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.algorithms.contract import Algorithm
from tutelage.algorithms.policy import PolicySettings, task_signal
from tutelage.config.objectives import PAYLOADS
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.errors import UserError
from tutelage.losses import flow
from tutelage.losses.contract import LossSum
from tutelage.losses.flow import FlowOut

STEPS = ("mask", "behaviour_logp", "sigmas", "latents", "targets")
"""Columns that every loss over denoising steps needs."""
ROUNDING = 1e-5
"""Relative tolerance for means of the same step, computed by the same model in different batches (float32)."""
CONDITIONING = ("text", "pooled", "negative_text", "negative_pooled")
"""Conditioning columns, stored once per prompt; each architecture uses some of them."""


@dataclass(frozen=True, slots=True)
class FlowGrpoLoss:
    """The clipped policy gradient of denoising steps, plus the KL to the reference."""

    clip: float
    advantage_clip: float
    guard: bool = False
    kl: float = 0.0
    several_updates: bool = False
    name: str = "flow_grpo"
    coefficient: float = 1.0

    def __call__(self, out: FlowOut, columns: Mapping[str, Tensor]) -> LossSum:
        advantage, cut = _bounded(columns["task_advantage"], self.advantage_clip)
        old = columns["behaviour_logp"]
        log_ratio = out.logp - old
        if self.guard:
            # With a single update the old mean is the current one.
            before = columns["means"] if self.several_updates else out.mean.detach()
            log_ratio = flow.guarded_log_ratio(out.logp, old, out.mean, before, out.std)
        result = flow.flow_grpo(log_ratio, advantage, self.clip)
        loss = result.loss
        seen = {
            "advantage": advantage,
            "advantage_cut": cut,
            "clipped": result.clipped.float(),
            "ratio": log_ratio.detach().exp(),
            "student_logp": out.logp.detach(),
        }
        if self.kl > 0:
            penalty = flow.step_kl(out.mean, out.reference_mean, out.std)
            loss = loss + self.kl * penalty
            seen["reference_kl"] = penalty.detach()
        return LossSum(loss.sum(), {"loss": loss.detach(), **seen})


@dataclass(frozen=True, slots=True)
class NftLoss:
    """Flow matching on the student's own samples, weighted by their advantage."""

    beta: float
    advantage_clip: float
    kl: float = 0.0
    several_updates: bool = False
    name: str = "diffusion_nft"
    coefficient: float = 1.0

    def __call__(self, out: FlowOut, columns: Mapping[str, Tensor]) -> LossSum:
        advantage, cut = _bounded(columns["task_advantage"], self.advantage_clip)
        weight = flow.optimality(advantage, self.advantage_clip)
        before = columns["old_velocity"] if self.several_updates else out.velocity.detach()
        loss = flow.diffusion_nft(out.velocity, before, out.targets, out.sigma, weight, self.beta)
        seen = {"advantage": advantage, "advantage_cut": cut, "optimality": weight}
        if self.kl > 0:
            penalty = ((out.velocity - out.reference_velocity()) ** 2).flatten(1).mean(1)
            loss = loss + self.kl * penalty
            seen["reference_kl"] = penalty.detach()
        return LossSum(loss.sum(), {"loss": loss.detach(), **seen})


@dataclass(frozen=True, slots=True)
class MatchLoss:
    """KL between the student's step and the teacher's, from latents that the student reached."""

    name: str = "step_matching"
    coefficient: float = 1.0

    def __call__(self, out: FlowOut, columns: Mapping[str, Tensor]) -> LossSum:
        teacher = columns["teacher_mean"]
        # Skip differences within rounding: an adaptive optimizer would turn them into full steps.
        apart = (out.mean.detach() - teacher).abs() > ROUNDING * (1 + teacher.abs())
        settled = ~apart.flatten(1).any(1)
        loss = flow.step_kl(out.mean, teacher, out.std).masked_fill(settled, 0.0)
        seen = {"divergence": loss.detach(), "settled": settled.float(), "student_logp": out.logp.detach()}
        return LossSum(loss.sum(), {"loss": loss.detach(), **seen})


@dataclass(frozen=True, slots=True)
class ReadVelocity:
    """Reads the student's velocity before the updates."""

    name: str = "old_velocity"
    coefficient: float = 1.0

    def __call__(self, out: FlowOut, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(out.velocity.sum(), {"old_velocity": out.velocity.detach()})


def flow_grpo(policy: PolicySettings, *, clip: float, advantage_clip: float, guard: bool, kl: float) -> Algorithm:
    """Build FlowGRPO: denoising steps are actions, and all steps of a sample share one advantage."""
    several = policy.several_updates
    loss = FlowGrpoLoss(clip, advantage_clip, guard, kl, several)
    return Algorithm(
        name="flow_grpo",
        needs=(*STEPS, "reward", *(("means",) if guard and several else ())),
        payload="none",
        losses=(loss,),
        note="expected reward of the finished media; steps are Gaussian actions"
        + (", log-ratios guarded" if guard else "")
        + (f"; KL to the reference {kl:g}" if kl > 0 else ""),
        over_rows=task_signal(policy),
        shares=CONDITIONING,
        at_first=ReplayGap(clip),
    )


def diffusion_nft(policy: PolicySettings, *, beta: float, advantage_clip: float, kl: float) -> Algorithm:
    """Build DiffusionNFT, which adds noise to finished samples again and needs no log-probs and no random sampler."""
    several = policy.several_updates
    return Algorithm(
        name="diffusion_nft",
        needs=(*STEPS, "reward"),
        payload="none",
        losses=(NftLoss(beta, advantage_clip, kl, several),),
        note=f"flow matching towards good media and away from bad ones, beta {beta:g}",
        over_rows=task_signal(policy),
        shares=CONDITIONING,
        reads=(ReadVelocity(),) if several else (),
    )


def flow_distill() -> Algorithm:
    """Build distillation from the teacher's mean at every step that the student took."""
    return Algorithm(
        name="distill",
        needs=(*STEPS, *PAYLOADS["step_mean"].columns),
        payload="step_mean",
        losses=(MatchLoss(),),
        note="KL(student step ‖ teacher step) on the student's own latents, exact for each step (both Gaussian, of "
        "one width)",
        shares=CONDITIONING,
        at_first=ReplayGap(),
    )


@dataclass(frozen=True, slots=True)
class ReplayGap:
    """Measures how far the learner's log-probs are from the sampler's with the same weights, at each step."""

    clip: float = math.inf
    """upper bound of the gap: above it, a loss that clips ratios would clip rounding errors"""

    def __call__(self, batch: Batch, columns: Mapping[str, Ragged]) -> dict[str, float]:
        gap = (columns["student_logp"].values - batch.columns["behaviour_logp"].values).abs()
        largest = float(gap.max()) if len(gap) else 0.0
        if largest > self.clip:
            raise UserError(
                f"algorithm.clip is {self.clip:g}, but log-probs of the same steps, with the same weights, differ by "
                f"up to {largest:.2g} between sampler and learner: the clip would act on rounding. Raise "
                "algorithm.clip, or set student.dtype to float32"
            )
        mask = batch.columns["mask"]
        step = torch.cat([row.nonzero().squeeze(-1) for row in mask.rows()])
        at = {int(number): float(gap[step == number].max()) for number in step.unique()}
        return {"replay_gap_max": largest} | {f"replay_gap/step_{number:02d}": value for number, value in at.items()}


def _bounded(advantage: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Clamp to ± limit, and return where the clamp applied."""
    return advantage.clamp(-limit, limit), (advantage.abs() > limit).float()
