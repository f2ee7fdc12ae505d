"""Parts that all policy gradients share, whatever the advantages are computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tutelage.algorithms.advantages import (
    Aggregation,
    Baseline,
    Scale,
    aggregation_weights,
    broadcast_episodes,
    episode_rewards,
    group_advantages,
)
from tutelage.algorithms.contract import Episodes, Signal
from tutelage.data.ragged import Ragged, offsets_of
from tutelage.losses import policy_gradient
from tutelage.losses.contract import LossSum, ModelOut
from tutelage.losses.policy_gradient import ImportanceMode, KlEstimator


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policy gradient loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token_mean"
    importance: ImportanceMode = "off"
    importance_cap: float = 2.0
    entropy: float = 0.0
    """coefficient of the entropy bonus"""
    kl: float = 0.0
    """coefficient of the KL to the reference, in the loss"""
    kl_estimator: KlEstimator = "k3_straight_through"
    baseline: Baseline = "mean"
    scale: Scale = "group_std"
    max_tokens: int = 1
    """divisor of sequence_sum: the maximum length of an answer"""
    several_updates: bool = False
    """the batch is used for several updates, so ratios are relative to the weights before the first one"""

    @property
    def needs_old_logp(self) -> bool:
        return self.several_updates or self.importance != "off"


def common(out: ModelOut, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the per-action columns that all losses over tokens report."""
    logp = out.logp.detach()
    return {"student_logp": logp, "entropy": out.entropy.detach(), "sampler_gap": sampler_gap(logp, columns)}


def sampler_gap(logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Return [actions]: the distance between the learner's and the sampler's log-probs.

    It is measured before the updates if `old_logp` is known, so that it does not include the effect of updates.
    """
    return (columns.get("old_logp", logp) - columns["behaviour_logp"]).abs()


def token_weight(policy: PolicySettings, logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor | None:
    """Return [actions]: importance weights for estimates from the sampled token, or None if none are needed.

    They cover the change from the weights before the updates to the current ones, and with `importance` also that from
    the sampler to the weights before the updates. They correct for tokens only, not for the states that were visited.
    """
    if not policy.needs_old_logp:
        return None
    old = columns["old_logp"]
    weight = _importance(policy, columns).weight
    return weight * policy_gradient.reuse_weight(logp, old) if policy.several_updates else weight


def _importance(policy: PolicySettings, columns: Mapping[str, Tensor]) -> policy_gradient.ImportanceWeight:
    old = columns["old_logp"] if policy.needs_old_logp else columns["behaviour_logp"]
    return policy_gradient.importance_weight(
        old, columns["behaviour_logp"], mode=policy.importance, cap=policy.importance_cap
    )


def later_updates(policy: PolicySettings) -> str:
    """Return a remark for the run's first line if a batch is used for several updates."""
    if not policy.several_updates:
        return ""
    return "; from a batch's second update on PPO's surrogate: advantages and states stay, ratios are clipped"


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """The clipped policy gradient of one advantage column, plus the KL to a reference and an entropy bonus."""

    policy: PolicySettings
    advantage: str
    name: str
    coefficient: float = 1.0
    shown: tuple[str, ...] = ()
    """columns of the batch that are copied to the record"""

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        policy, logp = self.policy, out.logp
        old = columns["old_logp" if policy.needs_old_logp else "behaviour_logp"]
        result = policy_gradient.clipped(
            logp,
            old,
            columns[self.advantage],
            clip_low=policy.clip_low,
            clip_high=policy.clip_high,
            dual=policy.dual_clip,
        )
        correction = _importance(policy, columns)
        loss = result.loss * correction.weight
        seen = {
            "advantage": columns[self.advantage],
            "clipped": result.clipped.float(),
            "dual_clipped": result.dual_clipped.float(),
            "overflowed": result.overflowed.float(),
            "ratio": (logp.detach() - old)
            .clamp(-policy_gradient.LOG_RATIO_LIMIT, policy_gradient.LOG_RATIO_LIMIT)
            .exp(),
        }
        if policy.importance != "off":
            seen["importance_cut"] = correction.cut.float()
        if policy.kl > 0:
            penalty = policy_gradient.kl_penalty(logp, columns["reference_logp"], policy.kl_estimator)
            weight = token_weight(policy, logp, columns)
            penalty = penalty if weight is None else penalty * weight
            loss = loss + policy.kl * penalty
            seen["reference_kl"] = penalty.detach()
        if policy.entropy > 0:
            loss = loss - policy.entropy * out.entropy
        weighted = loss * columns["weight"] if "weight" in columns else loss
        shown = {name: columns[name] for name in self.shown}
        return LossSum(weighted.sum(), {"loss": loss.detach(), **shown, **seen, **common(out, columns)})


def task_signal(policy: PolicySettings) -> Callable[[Mapping[str, Tensor], Episodes], Signal]:
    """Return a function that computes the advantage of each episode within its group.

    All trajectories of an episode get the same advantage.
    """

    def over_rows(rows: Mapping[str, Tensor], episodes: Episodes) -> Signal:
        rewards = episode_rewards(rows["reward"], episodes.of_row, episodes.reward_row)
        found = group_advantages(rewards, episodes.group, baseline=policy.baseline, scale=policy.scale)
        zero = found.zero_variance.float()
        metrics = reward_metrics(rewards)
        if len(zero):
            metrics["zero_variance_groups"] = float(zero.mean())
        return Signal(rows={"task_advantage": broadcast_episodes(found.advantages, episodes.of_row)}, metrics=metrics)

    return over_rows


def reward_metrics(rewards: Tensor) -> dict[str, float]:
    """Return the mean, minimum and maximum over episodes."""
    if len(rewards) == 0:
        return {}
    return {
        "reward": float(rewards.mean()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
    }


def aggregator(policy: PolicySettings) -> Callable[[Tensor], Mapping[str, Ragged]] | None:
    """Return a function that computes the `weight` column of the aggregation; None for the mean over actions."""
    if policy.aggregation == "token_mean":
        return None

    def weights(lengths: Tensor) -> Mapping[str, Ragged]:
        values = aggregation_weights(lengths, policy.aggregation, policy.max_tokens)
        return {"weight": Ragged(values, offsets_of(lengths))}

    return weights


@dataclass(frozen=True, slots=True)
class ReadLogp:
    """Reads the student's log-probs before the updates."""

    name: str = "old_logp"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(out.logp.sum(), {"old_logp": out.logp.detach()})
