"""PPO with a critic and GAE, and REINFORCE++ without a critic: the reward of an answer is spread over its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tutelage.algorithms.advantages import (
    broadcast_episodes,
    episode_rewards,
    explained_variance,
    final_rewards,
    gae,
    return_to_go,
    whiten,
)
from tutelage.algorithms.contract import Algorithm, Episodes, Signal
from tutelage.algorithms.policy import ClippedLoss, PolicySettings, aggregator, later_updates, reward_metrics
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.losses.contract import LossSum, ModelOut
from tutelage.losses.policy_gradient import kl_penalty
from tutelage.losses.value import value_loss

BASE = ("tokens", "mask", "behaviour_logp", "reward")


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The critic's loss: its values are fitted to the returns."""

    clip: float | None
    name: str = "value"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        values = out.values
        result = value_loss(values, columns["values"], columns["returns"], self.clip)
        seen = {"value_loss": result.loss.detach(), "value": values.detach(), "value_clipped": result.clipped.float()}
        return LossSum(result.loss.sum(), seen)


@dataclass(frozen=True, slots=True)
class ReadValues:
    """Reads the critic's value at every action, for advantages."""

    name: str = "values"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(out.values.sum(), {"values": out.values.detach()})


def _rewards(rows: Mapping[str, Tensor], episodes: Episodes) -> Signal:
    """Give every trajectory the reward of its episode."""
    rewards = episode_rewards(rows["reward"], episodes.of_row, episodes.reward_row)
    return Signal(
        rows={"episode_reward": broadcast_episodes(rewards, episodes.of_row)}, metrics=reward_metrics(rewards)
    )


def _per_action(batch: Batch, kl_in_reward: float) -> tuple[Ragged, dict[str, float]]:
    """Return per-action rewards: the reward at the last action, minus the KL to the reference at every action."""
    behaviour = batch.columns["behaviour_logp"]
    rewards = final_rewards(batch.rows["episode_reward"], behaviour.lengths)
    if kl_in_reward == 0:
        return rewards, {}
    penalty = kl_penalty(behaviour.values, batch.columns["reference_logp"].values, "k1")
    mean = float(penalty.mean()) if len(penalty) else 0.0
    return rewards.map(lambda values: values - kl_in_reward * penalty), {"reference_kl": mean}


def ppo(
    policy: PolicySettings, *, discount: float, lam: float, value_clip: float | None, kl_in_reward: float = 0.0
) -> Algorithm:
    """Build PPO: an actor and a critic, with GAE."""

    def over_columns(batch: Batch) -> Signal:
        rewards, metrics = _per_action(batch, kl_in_reward)
        values = batch.columns["values"]
        advantages, returns = gae(rewards, values, discount=discount, lam=lam)
        metrics["explained_variance"] = explained_variance(values.values, returns.values)
        columns = {"advantage": whiten(advantages), "returns": returns}
        return Signal(columns=columns, metrics=metrics)

    return Algorithm(
        name="ppo",
        needs=(*BASE, *_reference(policy, kl_in_reward)),
        payload="none",
        losses=(ClippedLoss(policy, advantage="advantage", name="policy"),),
        note=f"expected reward; advantages by GAE (discount {discount:g}, lambda {lam:g}) from a critic, whitened"
        + later_updates(policy),
        derives=(*(("old_logp",) if policy.needs_old_logp else ()), "values"),
        over_rows=_rewards,
        over_columns=over_columns,
        aggregate=aggregator(policy),
        critic_losses=(ValueLoss(value_clip),),
    )


def reinforce_plus_plus(policy: PolicySettings, *, discount: float, kl_in_reward: float) -> Algorithm:
    """Build REINFORCE++: returns, whitened over the batch, instead of a critic."""

    def over_columns(batch: Batch) -> Signal:
        rewards, metrics = _per_action(batch, kl_in_reward)
        advantages = whiten(return_to_go(rewards, discount))
        return Signal(columns={"advantage": advantages}, metrics=metrics)

    return Algorithm(
        name="reinforce_plus_plus",
        needs=(*BASE, *_reference(policy, kl_in_reward)),
        payload="none",
        losses=(ClippedLoss(policy, advantage="advantage", name="policy"),),
        note=f"expected reward; advantage = return (discount {discount:g}) whitened over the batch"
        + later_updates(policy),
        derives=("old_logp",) if policy.needs_old_logp else (),
        over_rows=_rewards,
        over_columns=over_columns,
        aggregate=aggregator(policy),
    )


def _reference(policy: PolicySettings, kl_in_reward: float) -> tuple[str, ...]:
    return ("reference_logp",) if policy.kl > 0 or kl_in_reward > 0 else ()
