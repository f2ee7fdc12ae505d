"""GRPO, Dr. GRPO and leave-one-out: rewards of whole answers, compared within the group of a prompt."""

from __future__ import annotations

from tutelage.algorithms.contract import Algorithm
from tutelage.algorithms.policy import ClippedLoss, PolicySettings, aggregator, later_updates, task_signal

BASE = ("tokens", "mask", "behaviour_logp", "reward")


def grpo(policy: PolicySettings) -> Algorithm:
    """Build GRPO: all actions of an episode share one advantage, and there is no critic."""
    scale = {"group_std": "the group's spread", "batch_std": "the batch's spread", "none": "1"}[policy.scale]
    against = {"mean": "the group's mean", "leave_one_out": "the mean of the others", "none": "0"}[policy.baseline]
    return Algorithm(
        name="grpo",
        needs=(*BASE, *(("reference_logp",) if policy.kl > 0 else ())),
        payload="none",
        losses=(ClippedLoss(policy, advantage="task_advantage", name="policy"),),
        note=f"expected reward; advantage = reward against {against}, divided by {scale}; {policy.aggregation}"
        + later_updates(policy)
        + (f"; KL to the reference {policy.kl:g} ({policy.kl_estimator})" if policy.kl > 0 else ""),
        derives=("old_logp",) if policy.needs_old_logp else (),
        over_rows=task_signal(policy),
        aggregate=aggregator(policy),
    )
