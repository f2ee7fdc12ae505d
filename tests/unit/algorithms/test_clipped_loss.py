"""Test the policy gradient loss of an algorithm beyond its formula: extreme log-probs, and terms that are off."""

from __future__ import annotations

import math

import torch

from tutelage.algorithms.distill import distill
from tutelage.algorithms.policy import ClippedLoss, PolicySettings
from tutelage.losses.contract import ModelOut

LOSS = ClippedLoss(PolicySettings(), advantage="task_advantage", name="policy")


def test_the_recorded_ratio_is_finite_however_far_the_student_has_moved() -> None:
    """Its mean over a batch is a metric: one infinite value would hide all others."""
    logits, ids = torch.zeros(3, 2), torch.tensor([0, 0, 0])
    own = -math.log(2)
    columns = {"behaviour_logp": torch.tensor([own, own - 200, own + 200]), "task_advantage": torch.ones(3)}
    found = LOSS(ModelOut(logits, ids, lambda h: h, 1.0), columns).per_action
    assert found["overflowed"].tolist() == [0.0, 1.0, 1.0]
    torch.testing.assert_close(found["ratio"], torch.tensor([0.0, 20.0, -20.0]).exp())


def test_without_a_bonus_the_loss_does_not_depend_on_the_entropy() -> None:
    """A student whose head excludes a token has no finite entropy, but a finite loss and gradient."""
    logits = torch.tensor([[0.5, -0.5, -math.inf], [0.1, 0.2, 0.3]], requires_grad=True)
    columns = {"behaviour_logp": torch.tensor([-0.5, -1.0]), "task_advantage": torch.tensor([1.0, -2.0])}
    out = ModelOut(logits, torch.tensor([0, 2]), lambda h: h, 1.0)
    assert not bool(out.entropy.isfinite().all())
    total = LOSS(out, columns).total
    assert bool(total.isfinite())
    assert bool(torch.autograd.grad(total, logits)[0].isfinite().all())


def test_a_bonus_rewards_entropy() -> None:
    logits = torch.tensor([[0.5, -0.5, 1.0], [0.1, 0.2, 0.3]])
    columns = {"behaviour_logp": torch.tensor([-0.5, -1.0]), "task_advantage": torch.tensor([1.0, -2.0])}
    loss = ClippedLoss(PolicySettings(entropy=0.1), advantage="task_advantage", name="policy")
    plain, found = (each(ModelOut(logits, torch.tensor([0, 2]), lambda h: h, 1.0), columns) for each in (LOSS, loss))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.per_action["loss"], plain.per_action["loss"] - 0.1 * entropy)


def test_estimates_of_the_sampled_token_are_weighted_in_later_updates() -> None:
    """Tokens were drawn by the weights before the updates: each counts as often as the student draws it now."""
    logits = torch.tensor([[0.4, -0.2, 0.1], [0.0, 1.0, -1.0]], requires_grad=True)
    ids = torch.tensor([0, 1])
    columns = {
        "behaviour_logp": torch.tensor([-1.2, -0.9]),
        "old_logp": torch.tensor([-1.2, -0.9]),
        "teacher_logp": torch.tensor([-0.4, -2.0]),
    }
    first, later = (
        distill(objective="k2", task_weight=0.5, policy=PolicySettings(several_updates=several)).losses[0]
        for several in (False, True)
    )
    out = ModelOut(logits, ids, lambda h: h, 1.0)
    plain, weighted = first(out, columns), later(out, columns)
    ratio = (out.logp.detach() - columns["old_logp"]).exp()
    torch.testing.assert_close(weighted.per_action["loss"], plain.per_action["loss"] * ratio)
    torch.testing.assert_close(weighted.per_action["divergence"], plain.per_action["divergence"])
