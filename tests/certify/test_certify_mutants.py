"""Test that `certify` detects faults that other systems had.

Each mutant names the rows to certify and the checks that must fail, to save time. Without a fault the same rows pass,
as test_certify.py shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.algorithms import advantages, distill, grpo, objectives, policy
from tutelage.algorithms.objectives import OBJECTIVES, Claim, Settings, register_objective
from tutelage.certify import Row, certify
from tutelage.certify.toy import TEMPERATURE, VOCABULARY
from tutelage.data.trajectory import Batch
from tutelage.engines import text_draws
from tutelage.engines.contract import Generation
from tutelage.learner import step as learning
from tutelage.learner import text, update
from tutelage.losses import contract, distillation, fused, policy_gradient
from tutelage.models.packing import pack

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Objectives that a test registers are gone afterwards."""
    known = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(known)


def failed(rows: list[Row]) -> set[str]:
    """Names of the checks that some row failed."""
    return {check for row in rows for check in row.reasons}


# ── the learner and the columns ──────────────────────────────────────────────────────────────────────────────────────


def shifted(by: int) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        chunks = text.TextPass.chunks

        def moved(self: text.TextPass) -> Any:
            columns = {
                name: column.map(lambda flat: flat.roll(by, 0)) if name.startswith("teacher") else column
                for name, column in self.part.columns.items()
            }
            self.part = replace(self.part, columns=columns)
            return chunks(self)

        patch.setattr(text.TextPass, "chunks", moved)

    return apply


def around_accumulate(change: Callable[..., None]) -> Patch:
    """`change(model, batch, losses, limits, real)` in place of the learner's."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real = update.accumulate

        def mutant(model: Any, batch: Batch, losses: Any, limits: Any, *_: Any) -> dict[str, Any]:
            change(model, batch, losses, limits, real)
            return update.measure(model, batch, losses, limits)

        patch.setattr(update, "accumulate", mutant)

    return apply


def scale(model: Any, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def by_micro_batches(model: Any, batch: Batch, losses: Any, limits: Any, real: Any) -> None:
    real(model, batch, losses, limits)
    scale(model, len(limits.split(batch)))


def sequence_mean(model: Any, batch: Batch, losses: Any, limits: Any, real: Any) -> None:
    for row in range(len(batch)):
        real(model, batch.select([row]), losses, limits)
    scale(model, 1 / len(batch))


def tools_too(patch: pytest.MonkeyPatch) -> None:
    """Cross-entropy of what the tools wrote, beside the objective, in the same pass."""

    def mutant(model: Any, part: Batch) -> tuple[Tensor, Tensor]:
        tokens, masks = part.columns["tokens"].rows(), part.columns["mask"].rows()
        packed = pack(tokens)
        hidden = model.forward_pack(packed)
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            logits = model.head(leaf, VOCABULARY).log_softmax(-1)
            wrong = logits.sum() * 0
            for places, row, mask in zip(packed.rows, tokens, masks, strict=True):
                after = torch.arange(len(row)) > mask.to(torch.uint8).argmax()
                at = (after & ~mask).nonzero().squeeze(-1)
                wrong = wrong - logits[places[at - 1], row[at]].sum()
            (slope,) = torch.autograd.grad(wrong / int(part.columns["mask"].values.sum()), leaf)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient + slope)
        at = [row[mask.nonzero().squeeze(-1) - 1] for row, mask in zip(packed.rows, masks, strict=True)]
        return hidden[torch.cat(at)], torch.tensor([len(a) for a in at], dtype=torch.int64)

    patch.setattr(text, "_action_states", mutant)


def state_after_the_action(patch: pytest.MonkeyPatch) -> None:
    def mutant(model: Any, part: Batch) -> tuple[Tensor, Tensor]:
        packed, masks = pack(part.columns["tokens"].rows()), part.columns["mask"].rows()
        at = [row[mask.nonzero().squeeze(-1)] for row, mask in zip(packed.rows, masks, strict=True)]
        return model.forward_pack(packed)[torch.cat(at)], torch.tensor([len(a) for a in at], dtype=torch.int64)

    patch.setattr(text, "_action_states", mutant)


def temperature_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contract, "tempered", lambda logits, temperature: logits)


def temperature_copied(patch: pytest.MonkeyPatch) -> None:
    real = distill.expand
    patch.setattr(distill, "expand", lambda *args: (real(*args) / TEMPERATURE).log_softmax(-1))


def last_chunk_dropped(patch: pytest.MonkeyPatch) -> None:
    real = text.TextPass.chunks

    def mutant(self: text.TextPass) -> Any:
        left = len(self.positions)
        for number, chunk in enumerate(real(self)):
            left -= len(chunk.out.ids)
            if number > 0 and left == 0:
                chunk.out.hidden = chunk.out.hidden * 0.5
            yield chunk

    patch.setattr(text.TextPass, "chunks", mutant)


# ── formulas and advantages ──────────────────────────────────────────────────────────────────────────────────────────


def no_tail(patch: pytest.MonkeyPatch) -> None:
    student, teacher = distillation.buckets, distillation.teacher_buckets
    patch.setattr(distillation, "buckets", lambda *args: student(*args)[:, :-1])
    patch.setattr(distillation, "teacher_buckets", lambda *args: teacher(*args)[:, :-1])


def fused_sign(patch: pytest.MonkeyPatch) -> None:
    def rule(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        value, gradient = fused.reverse_kl(student, teacher, floor)
        return value, -gradient

    patch.setitem(OBJECTIVES, "reverse_kl", replace(OBJECTIVES["reverse_kl"], rule=lambda settings: rule))


def fused_clamp(patch: pytest.MonkeyPatch) -> None:
    """A gradient that is cut where the student is worst."""

    def rule(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        far = (student - teacher).amin(-1, keepdim=True) < -5
        value, gradient = fused.forward_kl(student, teacher, floor)
        return value, gradient.masked_fill(far, 0.0)

    patch.setitem(OBJECTIVES, "forward_kl", replace(OBJECTIVES["forward_kl"], rule=lambda settings: rule))


def on_clipped(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Patch:
    """`change(logp, old_logp, advantage)` is the advantage instead."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real = policy_gradient.clipped

        def mutant(logp: Tensor, old: Tensor, advantage: Tensor, **settings: Any) -> policy_gradient.Clipped:
            return real(logp, old, change(logp, old, advantage), **settings)

        patch.setattr(policy_gradient, "clipped", mutant)

    return apply


def attached(logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """k1 as the student has it now, with its gradient."""
    return advantage - (logp - logp.detach())


def discount_ignored(patch: pytest.MonkeyPatch) -> None:
    real = advantages.return_to_go
    patch.setattr(distill, "return_to_go", lambda values, discount: real(values, 0.0))


def stretched_baseline(patch: pytest.MonkeyPatch) -> None:
    real = advantages._less_baseline

    def mutant(rewards: Tensor, centred: Tensor, stretch: Tensor, baseline: Any) -> Tensor:
        return real(rewards, centred - 0.1 * (rewards - centred), stretch, baseline)

    patch.setattr(advantages, "_less_baseline", mutant)


def stretched_advantage(patch: pytest.MonkeyPatch) -> None:
    real = advantages.group_advantages

    def mutant(*args: Any, **settings: Any) -> advantages.GroupAdvantages:
        found = real(*args, **settings)
        return replace(found, advantages=1.1 * found.advantages)

    patch.setattr(policy, "group_advantages", mutant)


def silent_aggregation(patch: pytest.MonkeyPatch) -> None:
    real = policy.aggregator
    patch.setattr(grpo, "aggregator", lambda settings: real(replace(settings, aggregation="sequence_mean")))


def wrong_episode(patch: pytest.MonkeyPatch) -> None:
    """Every row with a reward of its own, instead of its episode's."""
    patch.setattr(policy, "episode_rewards", lambda rewards, of_row, last: rewards[of_row.unique_consecutive()])


def plain_straight_through(patch: pytest.MonkeyPatch) -> None:
    real = policy_gradient.kl_penalty
    patch.setattr(policy_gradient, "kl_penalty", lambda logp, reference, estimator: real(logp, reference, "k3"))


def settings_lost(patch: pytest.MonkeyPatch) -> None:
    real = objectives.OBJECTIVES["jsd"]
    patch.setitem(OBJECTIVES, "jsd", replace(real, rule=lambda settings: fused.jsd(0.5)))


def importance_inverted(patch: pytest.MonkeyPatch) -> None:
    real = policy_gradient.importance_weight
    patch.setattr(policy_gradient, "importance_weight", lambda old, behaviour, **more: real(behaviour, old, **more))


def importance_from_now(patch: pytest.MonkeyPatch) -> None:
    """The log-probs of the weights now instead of those before the updates."""
    clipped, importance, now = policy_gradient.clipped, policy_gradient.importance_weight, list[Tensor]()

    def watched(logp: Tensor, *rest: Any, **more: Any) -> policy_gradient.Clipped:
        now[:] = [logp.detach()]
        return clipped(logp, *rest, **more)

    patch.setattr(policy_gradient, "clipped", watched)
    patch.setattr(policy_gradient, "importance_weight", lambda old, *rest, **more: importance(now[0], *rest, **more))


def reused_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy_gradient, "reuse_weight", lambda logp, old: torch.ones_like(logp.detach()))


def reused_inverted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy_gradient, "reuse_weight", lambda logp, old: (old - logp.detach()).exp())


def reused_with_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy_gradient, "reuse_weight", lambda logp, old: (logp - old).exp())


def one_part(patch: pytest.MonkeyPatch) -> None:
    """Every update from the whole batch."""
    real = learning.minibatches
    patch.setattr(
        learning,
        "minibatches",
        lambda batch, schedule, epoch: [list(range(len(batch)))] * len(real(batch, schedule, epoch)),
    )


def old_of_now(patch: pytest.MonkeyPatch) -> None:
    """The learner's log-probs are never those of before: every ratio is 1."""
    real = contract.ModelOut.logp.fget
    assert real is not None
    call = policy.ClippedLoss.__call__

    def mutant(self: Any, out: Any, columns: Any) -> Any:
        return call(self, out, {**columns, "old_logp": real(out).detach()})

    patch.setattr(policy.ClippedLoss, "__call__", mutant)


def constraint_ignored(patch: pytest.MonkeyPatch) -> None:
    """The learner takes the free distribution."""
    patch.setattr(text, "ModelOut", lambda *arguments: contract.ModelOut(*arguments[:5]))


def mask_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """Every action within what was allowed at the one before it, and itself."""
    real = text.Limits.allowed

    def mutant(self: text.Limits, batch: Batch) -> Any:
        found = real(self, batch)
        if found is None:
            return None
        ids = batch.columns["tokens"].values[batch.columns["mask"].values]
        inside = found.at(slice(None), torch.device("cpu"))
        assert inside is not None
        moved = inside.roll(1, 0).scatter(-1, ids[:, None], True)
        bits = (moved * 2 ** torch.arange(VOCABULARY)).sum(-1).tolist()
        return type(found).of([bytes([b]) for b in bits], VOCABULARY)

    patch.setattr(text.Limits, "allowed", mutant)


def teacher_unconstrained(patch: pytest.MonkeyPatch) -> None:
    """The teacher's distribution over all tokens, of which some are left out."""
    patch.setattr(distill, "renormalised", lambda log_probs, allowed: log_probs)


def forced_tokens_trained_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generation, "acted", property(lambda self: torch.ones_like(self.tokens, dtype=torch.bool)))


def free_behaviour(patch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn within the constraint, and their log-probs are those of the free distribution."""
    restricted, draw, free = text_draws.restricted, text_draws.draw, list[Tensor]()

    def watched(logits: Tensor, allowed: Tensor | None) -> Tensor:
        free[:] = [logits]
        return restricted(logits, allowed)

    def mutant(*arguments: Any) -> Any:
        drawn = draw(*arguments)
        return replace(drawn, logp=free[0].log_softmax(-1).gather(-1, drawn.ids[:, None]).squeeze(-1))

    patch.setattr(text_draws, "restricted", watched)
    patch.setattr(text_draws, "draw", mutant)


@dataclass(frozen=True)
class Mutant:
    """What is broken, which rows see it, and which checks must."""

    break_it: Patch
    row: str
    """beginning of the subject's id"""
    caught_by: tuple[str, ...]


MUTANTS: Mapping[str, Mutant] = {
    "teacher shifted by one, full": Mutant(shifted(1), "reverse_kl/full/supervised", ("target", "plain", "splits")),
    "teacher shifted by one, sampled": Mutant(shifted(1), "k2/sampled/supervised", ("target", "plain", "splits")),
    "teacher shifted by one, top k": Mutant(shifted(1), "forward_kl/top_k", ("target", "plain", "splits")),
    "teacher shifted by the prompt": Mutant(shifted(2), "reverse_kl/full/supervised", ("target", "plain", "splits")),
    "micro-batch scaling": Mutant(
        around_accumulate(by_micro_batches), "reverse_kl/full/supervised", ("plain", "splits")
    ),
    "sequence mean for token mean": Mutant(around_accumulate(sequence_mean), "reverse_kl/full/supervised", ("plain",)),
    "sequence mean in grpo": Mutant(silent_aggregation, "grpo/rewards/mean, none", ("plain",)),
    "tool tokens trained on": Mutant(tools_too, "k2/sampled/supervised", ("plain", "masks")),
    "the state after the action": Mutant(state_after_the_action, "reverse_kl/full/supervised", ("target", "masks")),
    "student's temperature forgotten": Mutant(temperature_forgotten, "reverse_kl/full/supervised", ("target", "plain")),
    "student's temperature for the teacher": Mutant(
        temperature_copied, "reverse_kl/full/supervised", ("target", "plain", "agreement")
    ),
    "a chunk that weighs less": Mutant(last_chunk_dropped, "reverse_kl/full/supervised", ("plain", "splits")),
    "missing tail, teacher's k": Mutant(no_tail, "forward_kl/top_k", ("target", "plain")),
    "missing tail, student's k": Mutant(no_tail, "reverse_kl/student_top_k", ("target", "plain")),
    "sign of the fused gradient": Mutant(
        fused_sign, "reverse_kl/full/supervised", ("target", "plain", "finite_differences")
    ),
    "clamp of the fused gradient": Mutant(fused_clamp, "forward_kl/full", ("target", "plain", "finite_differences")),
    "sign of the advantage": Mutant(on_clipped(lambda *a: -a[2]), "k1/sampled", ("target", "plain")),
    "advantage not detached": Mutant(on_clipped(attached), "k1/sampled/policy_gradient", ("plain",)),
    "discount ignored": Mutant(discount_ignored, "k1/sampled/policy_gradient/discount 1", ("target", "plain")),
    "baseline with a factor": Mutant(stretched_baseline, "grpo/rewards/leave_one_out, none", ("target", "plain")),
    "advantage with a factor": Mutant(stretched_advantage, "grpo/rewards/leave_one_out, none", ("target", "plain")),
    "reward of the first trajectory": Mutant(wrong_episode, "grpo/rewards/leave_one_out, none", ("plain",)),
    "k3 for straight-through": Mutant(
        plain_straight_through, "reference_kl/reference/loss, k3_straight_through", ("target", "plain")
    ),
    "settings that do not arrive": Mutant(settings_lost, "jsd/full", ("target", "plain")),
    "importance inverted, truncate": Mutant(
        importance_inverted, "grpo/rewards/none, none, sampler apart, truncate", ("target", "plain")
    ),
    "importance inverted, mask": Mutant(
        importance_inverted, "grpo/rewards/none, none, sampler apart, mask", ("target", "plain")
    ),
    "importance from the weights now": Mutant(
        importance_from_now, "grpo/rewards/none, none, sampler apart, second update", ("target", "plain", "updates")
    ),
    "tokens of before, k2": Mutant(
        reused_as_it_is, "k2/sampled/supervised, task rewards, second", ("target", "plain", "updates")
    ),
    "tokens of before, k3": Mutant(
        reused_inverted, "k3/sampled/supervised, task rewards, second", ("target", "plain", "updates")
    ),
    "tokens of before, the reference": Mutant(
        reused_as_it_is, "reference_kl/reference/loss, k3, second", ("target", "plain", "updates")
    ),
    "a weight that is differentiated": Mutant(
        reused_with_gradient, "reference_kl/reference/loss, k2, second", ("target", "plain", "updates")
    ),
    "no parts": Mutant(one_part, "grpo/rewards/none, none, second update", ("updates",)),
    "constraint ignored, full": Mutant(
        constraint_ignored, "reverse_kl/full/supervised, constrained", ("target", "plain")
    ),
    "constraint ignored, rewards": Mutant(
        constraint_ignored, "grpo/rewards/leave_one_out, none, constrained", ("target", "plain")
    ),
    "constraint ignored, sampled": Mutant(
        constraint_ignored, "k1/sampled/policy_gradient, constrained", ("target", "plain")
    ),
    "constraint ignored, reference": Mutant(
        constraint_ignored, "reference_kl/reference/loss, k2, constrained", ("target", "plain", "agreement")
    ),
    "constraint ignored, entropy": Mutant(constraint_ignored, "entropy/none/loss, constrained", ("target", "plain")),
    "masks shifted by one": Mutant(
        mask_of_the_token_before, "reverse_kl/full/supervised, constrained", ("target", "plain", "splits")
    ),
    "teacher not restricted": Mutant(
        teacher_unconstrained, "forward_kl/full/supervised, constrained", ("target", "plain", "agreement")
    ),
    "forced tokens trained on, full": Mutant(
        forced_tokens_trained_on, "reverse_kl/full/supervised, constrained", ("target", "plain")
    ),
    "forced tokens trained on, rewards": Mutant(
        forced_tokens_trained_on, "grpo/rewards/leave_one_out, none, constrained", ("target", "plain")
    ),
    "behaviour of the free distribution, rewards": Mutant(
        free_behaviour, "grpo/rewards/leave_one_out, none, constrained", ("target", "plain")
    ),
    "behaviour of the free distribution, importance": Mutant(
        free_behaviour, "grpo/rewards/none, none, sampler apart, truncate, constrained", ("target", "plain")
    ),
    "ratios of 1": Mutant(old_of_now, "grpo/rewards/none, none, second update", ("target", "plain", "updates")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.break_it(monkeypatch)
    rows = certify(only=lambda subject: subject.id.startswith(mutant.row), checks=mutant.caught_by)
    assert rows
    assert failed(rows) == set(mutant.caught_by)
    assert not all(row.passed for row in rows)
    reasons = [str(reason) for row in rows for reason in row.reasons.values()]
    assert not any("raised " in reason for reason in reasons), "a mutant that crashes proves nothing"


# ── claims that are wrong ────────────────────────────────────────────────────────────────────────────────────────────


def min_clamp(q: Tensor, p: Tensor, settings: Settings) -> Tensor:
    q, p = q.clamp_min(-10), p.clamp_min(-10)
    return (p.exp() * (p - q)).sum(-1)


def zero_clamp(q: Tensor, p: Tensor, settings: Settings) -> Tensor:
    return (p.exp() * (p - q)).sum(-1).clamp(0, 10)


def p_log_p(q: Tensor, p: Tensor, settings: Settings) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def hidden_nan(q: Tensor, p: Tensor, settings: Settings) -> Tensor:
    """The loss is finite where the teacher excludes a token; its gradient is 0 · ∞."""
    ratio = q / p.exp()
    return torch.where(p > -torch.inf, p.exp() * (p - p.exp() * ratio), torch.zeros_like(p)).nan_to_num(0.0).sum(-1)


CLAIMS: Mapping[str, tuple[str, str, Any, str, str]] = {
    "k3 as reverse KL": ("token", "reverse_kl", lambda q, p, s: (p - q).exp() - 1 - (p - q), "target", "forward_kl"),
    "k1 as reverse KL": ("token", "reverse_kl", lambda q, p, s: q - p.clamp_min(-30), "target", "off the target"),
    "k1 as itself": ("token", "", lambda q, p, s: q - p.clamp_min(-30), "target", "off the target"),
    "k3 with a hidden clamp": (
        "token",
        "forward_kl",
        lambda q, p, s: distillation.low_var_kl(q, p),
        "target",
        "off the target",
    ),
    "verl's min clamp": ("distribution", "forward_kl", min_clamp, "target", "off the target"),
    "verl's top k": ("top_k", "forward_kl", zero_clamp, "target", "off the target"),
    "a factor": ("distribution", "forward_kl", lambda q, p, s: 2 * distillation.forward_kl(q, p), "target", "2 times"),
    "a sign": ("distribution", "forward_kl", lambda q, p, s: -distillation.forward_kl(q, p), "target", "-1 times"),
    "p log p": ("distribution", "forward_kl", p_log_p, "extremes", "the loss is not finite"),
    "a NaN behind a finite loss": ("distribution", "", hidden_nan, "extremes", "the gradient is not finite"),
    "a mean over the chunk": (
        "distribution",
        "forward_kl",
        lambda q, p, s: distillation.forward_kl(q, p) / len(q),
        "splits",
        "differs",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_wrong_claim_is_caught(name: str) -> None:
    sees, claim, formula, check, reason = CLAIMS[name]
    register_objective("mine", sees=sees, claim=claim)(formula)  # type: ignore[arg-type]
    rows = certify(["mine"], only=lambda subject: subject.form == "supervised", checks=[check])
    assert rows
    assert any(reason in row.reasons.get(check, "") for row in rows)
    assert check == "extremes" or all(check in row.reasons for row in rows)


@pytest.mark.parametrize(
    ("name", "form", "claim"),
    [
        ("k2", "supervised", Claim("reverse_kl", False, "said to be biased")),
        ("k1", "policy_gradient", Claim("", False, "said to descend nothing")),
        ("k3", "policy_gradient", Claim("reverse_kl", True, "forgets the other half")),
        ("k2", "policy_gradient", Claim("", True, "said to have no gradient")),
    ],
)
def test_a_wrong_word_about_a_bias_is_caught(
    name: str, form: str, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: dict[str, Any] = {form: claim}
    monkeypatch.setitem(OBJECTIVES, name, replace(OBJECTIVES[name], **changed))
    rows = certify([name], only=lambda subject: subject.form == form, checks=["target"])
    assert rows
    assert all("target" in row.reasons for row in rows)
