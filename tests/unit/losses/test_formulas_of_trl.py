"""Test how the objectives of TRL are written here: where they are equal, where they differ. See docs/from_trl.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peers import trl_advantages, trl_clipped, trl_jsd, trl_kl, trl_reduced, trl_rloo
from tutelage.algorithms.advantages import Aggregation, Baseline, Scale, aggregation_weights, group_advantages
from tutelage.losses.distillation import forward_kl, jsd, reverse_kl
from tutelage.losses.policy_gradient import KlEstimator, clipped, importance_weight, kl_penalty, reuse_weight

LENGTHS = torch.tensor([6, 2, 4, 1])
MASK = (torch.arange(6)[None] < LENGTHS[:, None]).double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reduced(losses: Tensor, mode: Aggregation, max_tokens: int) -> Tensor:
    """Our reduction of padded losses."""
    weights = aggregation_weights(LENGTHS, mode, max_tokens).double()
    return (weights * losses[MASK.bool()]).sum() / MASK.sum()


# ── distillation ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_beta_selects_the_divergence(temperature: float) -> None:
    """β 0 is forward_kl, 1 is reverse_kl, and others are jsd with the same β, with both sides at one temperature."""
    student, teacher = 2 * drawn(5, 11), 2 * drawn(5, 11, seed=1)
    q, p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    torch.testing.assert_close(forward_kl(q, p), trl_jsd(student, teacher, 0, temperature))
    torch.testing.assert_close(reverse_kl(q, p), trl_jsd(student, teacher, 1, temperature))
    for beta in (0.1, 0.5, 0.9):
        torch.testing.assert_close(jsd(q, p, beta), trl_jsd(student, teacher, beta, temperature))


def test_a_teacher_at_its_own_temperature_is_another_objective() -> None:
    """With TRL's temperature on both sides a student that equals its teacher stays; with the teacher at 1 it moves."""
    logits = 2 * drawn(5, 11)
    assert float(trl_jsd(logits, logits, 1, temperature=0.5).abs().max()) < 1e-12
    assert float(reverse_kl((logits / 0.5).log_softmax(-1), logits.log_softmax(-1)).min()) > 0.01


# ── GRPO ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("theirs", "ours"), [("group", "group_std"), ("batch", "batch_std"), ("none", "none")])
def test_advantages_are_equal(theirs: str, ours: Scale) -> None:
    rewards, groups = drawn(3, 4), torch.arange(3).repeat_interleave(4)
    found = group_advantages(rewards.flatten(), groups, baseline="mean", scale=ours).advantages
    torch.testing.assert_close(found, trl_advantages(rewards, theirs).flatten())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("theirs", "ours"), [("dapo", "token_mean"), ("grpo", "sequence_mean"), ("dr_grpo", "sequence_sum")]
)
def test_a_loss_type_is_an_aggregation_however_the_batch_is_split(theirs: str, ours: Aggregation, parts: int) -> None:
    losses = drawn(4, 6)
    torch.testing.assert_close(reduced(losses, ours, 9), trl_reduced(losses, MASK, theirs, parts, longest=9))


def test_bnpo_is_the_token_mean_of_one_micro_batch_only() -> None:
    losses = drawn(4, 6)
    torch.testing.assert_close(reduced(losses, "token_mean", 9), trl_reduced(losses, MASK, "bnpo", 1, longest=9))
    assert float((reduced(losses, "token_mean", 9) - trl_reduced(losses, MASK, "bnpo", 2, longest=9)).abs()) > 1e-2


@pytest.mark.parametrize("delta", [None, 1.5, 3.0])
def test_delta_is_the_dual_clip(delta: float | None) -> None:
    old, advantage = -drawn(400).abs(), drawn(400, seed=2)
    logp = old + drawn(400, seed=1)
    ours = clipped(logp, old, advantage, clip_low=0.2, clip_high=0.28, dual=delta)
    torch.testing.assert_close(ours.loss, trl_clipped(logp, old, advantage, 0.2, 0.28, delta))
    if delta:
        assert bool(ours.dual_clipped.any())


def test_the_default_here_bounds_what_the_default_there_does_not() -> None:
    old, logp, advantage = torch.tensor([-3.0]), torch.tensor([-1.0]), torch.tensor([-1.0])
    assert float(clipped(logp, old, advantage, clip_low=0.2, clip_high=0.2, dual=3.0).loss) == pytest.approx(3.0)
    assert float(trl_clipped(logp, old, advantage, 0.2, 0.2, None)) == pytest.approx(7.389, abs=1e-3)


def mean_gradient(logits: Tensor, old: Tensor, penalty: Tensor, weight: Tensor) -> Tensor:
    """The gradient of Σ old(y) · w(y) · penalty(y) over all tokens y: what sampling from `old` gives on average."""
    (total,) = torch.autograd.grad((old.exp() * weight * penalty).sum(), logits)
    return total


@pytest.mark.parametrize("moved", [0.0, 0.7])
@pytest.mark.parametrize(("corrected", "ours"), [(True, "k3_straight_through"), (False, "k3")])
def test_the_kl_to_the_reference(corrected: bool, ours: KlEstimator, moved: float) -> None:
    """TRL's default has the mean gradient of KL(student‖reference), as ours; without the correction, that of k3.

    In a second update (`moved`) ours is weighted by the ratio, which TRL's correction includes and k3 there lacks.
    """
    old = drawn(9).log_softmax(-1)
    logits = (old + moved * drawn(9, seed=1)).requires_grad_()
    reference = drawn(9, seed=2).log_softmax(-1)
    logp = logits.log_softmax(-1)
    theirs = mean_gradient(logits, old, trl_kl(logp, old, reference, corrected=corrected), torch.ones(9))
    logp = logits.log_softmax(-1)
    mine = mean_gradient(logits, old, kl_penalty(logp, reference, ours), reuse_weight(logp, old))
    if corrected or moved == 0:
        torch.testing.assert_close(mine, theirs)
    else:
        assert float((mine - theirs).abs().max()) > 1e-2
    if corrected:
        (exact,) = torch.autograd.grad(reverse_kl(logits.log_softmax(-1)[None], reference[None]).sum(), logits)
        torch.testing.assert_close(theirs, exact)


def test_token_level_importance_weights() -> None:
    """`token_truncate` is truncate; `token_mask` is mask if the lower bound there is the inverse of the upper."""
    learner, sampler = drawn(200), drawn(200, seed=1)
    ratio = (learner - sampler).exp()
    assert torch.equal(importance_weight(learner, sampler, mode="truncate", cap=3.0).weight, ratio.clamp(max=3.0))
    kept = torch.where((ratio > 3.0) | (ratio < 1 / 3.0), 0.0, ratio)
    assert torch.equal(importance_weight(learner, sampler, mode="mask", cap=3.0).weight, kept)


# ── RLOO ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rloo_is_leave_one_out_with_sums_of_tokens_in_the_first_update() -> None:
    """`max_tokens` times our loss with aggregation sequence_sum. From a second update on, TRL clips whole answers."""
    rewards, groups = drawn(4), torch.tensor([0, 0, 1, 1])
    baseline: Baseline = "leave_one_out"
    advantages = group_advantages(rewards, groups, baseline=baseline, scale="none").advantages
    torch.testing.assert_close(advantages, rewards - rewards.view(2, 2).flip(1).flatten())
    old = -drawn(4, 6, seed=1).abs()

    def gradients(logp: Tensor) -> tuple[Tensor, Tensor]:
        wide = advantages[:, None].expand_as(logp)
        tokens = clipped(logp, old, wide, clip_low=0.2, clip_high=0.2, dual=None).loss
        (ours,) = torch.autograd.grad(9 * reduced(tokens, "sequence_sum", 9), logp)
        (theirs,) = torch.autograd.grad(trl_rloo(logp, old, advantages, MASK, 0.2), logp)
        return ours, theirs

    torch.testing.assert_close(*gradients(old.clone().requires_grad_()))
    ours, theirs = gradients((old + 0.3 * drawn(4, 6, seed=2)).requires_grad_())
    assert float((ours - theirs).abs().max()) > 1e-2
