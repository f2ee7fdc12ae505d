"""Test the learner on rows that were drawn under constraints, with real engines, masks and trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from constrained import CALL, JSON, THE, YES_NO
from constrained_rows import (
    LIMITS,
    ROWS,
    batch_of,
    chosen,
    head,
    inside,
    plain_gradients,
    plain_log_probs,
    plain_student,
    plain_teacher,
    scores,
    trajectories,
)
from learner_batches import STUDENT, TEACHER, distance, gradients
from tutelage.algorithms.contract import Algorithm
from tutelage.algorithms.distill import distill
from tutelage.algorithms.grpo import grpo
from tutelage.algorithms.measures import PlainMeasures, SampledMeasures, TeacherMeasures
from tutelage.algorithms.objectives import OBJECTIVES, Settings, register_objective
from tutelage.algorithms.policy import PolicySettings, ReadLogp
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Trajectory
from tutelage.errors import UserError
from tutelage.learner import text
from tutelage.learner.ranks import alone
from tutelage.learner.reference import ReferenceCheck
from tutelage.learner.update import measure
from tutelage.losses import distillation
from tutelage.losses.contract import ModelOut
from tutelage.policy.constraints import from_column

# ── sampler and learner ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_rows_are_what_the_tests_need() -> None:
    rows = trajectories()
    spans = [from_column(row.extra["constraints"]) for row in rows]
    assert {constraint for row in spans for _, _, constraint in row} == {JSON, THE, CALL, YES_NO}
    assert max(len(row) for row in spans) == 2
    assert any(not row for row in spans)
    forced = [int((row.written & ~row.mask).sum()) for row in rows]
    assert sum(forced) > 20
    assert all(len(row.behaviour_logp) == int(row.mask.sum()) for row in rows)
    for row in rows:
        assert bool((inside(row).sum(-1) > 1).all())  # no action was forced


@pytest.mark.parametrize("logit_tokens", [1, 5, 1000])
def test_sampler_and_learner_agree(logit_tokens: int) -> None:
    rows = trajectories()
    found = measure(STUDENT, batch_of(rows), [ReadLogp()], replace(LIMITS, logit_tokens=logit_tokens))["old_logp"]
    for row, learned in zip(rows, found.rows(), strict=True):
        torch.testing.assert_close(learned, row.behaviour_logp, atol=1e-5, rtol=0)


def test_without_the_constraints_sampler_and_learner_differ() -> None:
    rows = trajectories()
    free = replace(batch_of(rows), objects={})
    found = measure(STUDENT, free, [ReadLogp()], LIMITS)["old_logp"]
    gaps = [float((f - row.behaviour_logp).abs().max()) for f, row in zip(found.rows(), rows, strict=True)]
    assert [gap > 0.1 for gap in gaps] == [bool(row.extra["constraints"]) for row in rows]


def test_free_rows_are_bit_identical_beside_constrained_ones() -> None:
    """Also in a chunk that has both."""
    batch = batch_of(trajectories())
    limits = replace(LIMITS, micro_batch_tokens=10**6, logit_tokens=1000)
    free = batch.objects["constraints"].index([])
    mixed = measure(STUDENT, batch, [ReadLogp(), PlainMeasures()], limits)
    plain = measure(STUDENT, replace(batch, objects={}), [ReadLogp(), PlainMeasures()], limits)
    for name in ("old_logp", "entropy"):
        assert torch.equal(mixed[name].row(free), plain[name].row(free))


def test_probabilities_of_what_is_allowed_sum_to_one() -> None:
    batch = batch_of(trajectories())
    work = LIMITS.run(STUDENT, batch, list(range(len(batch))))
    seen = 0
    with torch.no_grad():
        for chunk in work.chunks():
            logp, allowed = chunk.out.log_probs, chunk.out.allowed
            torch.testing.assert_close(logp.exp().sum(-1), torch.ones(len(logp)))
            assert bool(torch.isfinite(logp).all())
            assert bool(torch.isfinite(chunk.out.entropy).all())
            if allowed is not None:
                assert not bool(logp.exp()[~allowed].any())
                seen += len(allowed)
    assert seen > 20


def test_entropy_is_that_of_what_is_allowed() -> None:
    rows = trajectories()
    found = measure(STUDENT, batch_of(rows), [PlainMeasures()], LIMITS)["entropy"].rows()
    for number, row in enumerate(rows):
        with torch.no_grad():
            logp = plain_log_probs(plain_student(), row, 0.7)
        expected = torch.distributions.Categorical(logits=logp.double()).entropy().float()
        torch.testing.assert_close(found[number], expected, atol=1e-5, rtol=0)


def test_the_masks_of_a_critic_are_not_computed() -> None:
    critic = tiny.causal_lm(seed=3)
    critic.add_value_head()
    batch = batch_of(trajectories())
    broken = replace(LIMITS, masks=None)
    assert broken.run(critic, batch, [0, 1]).allowed is None


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def policy(**changed: Any) -> Algorithm:
    return grpo(PolicySettings(dual_clip=None, **changed))


def on_policy(logp: Tensor, row: Trajectory, number: int) -> Tensor:
    own = chosen(logp, row)
    return -(own - own.detach()).exp() * float(torch.linspace(-1, 1, ROWS)[number])


def full(objective: str) -> Algorithm:
    return distill(objective=objective, heads=[head(TEACHER)])


CASES: dict[str, tuple[Algorithm, Callable[[Tensor, Trajectory, int], Tensor]]] = {
    "grpo": (policy(), on_policy),
    "grpo, entropy": (
        policy(entropy=0.3),
        lambda q, row, n: on_policy(q, row, n) + 0.3 * (q.exp() * q).sum(-1),
    ),
    "grpo, kl": (
        policy(kl=0.5, kl_estimator="k2"),
        lambda q, row, n: (
            on_policy(q, row, n) + 0.5 * 0.5 * (chosen(q, row) - chosen(plain_teacher(n, 0.7), row)).square()
        ),
    ),
    "reverse_kl": (full("reverse_kl"), lambda q, row, n: (q.exp() * (q - plain_teacher(n))).sum(-1)),
    "forward_kl": (full("forward_kl"), lambda q, row, n: (plain_teacher(n).exp() * (plain_teacher(n) - q)).sum(-1)),
    "jsd": (full("jsd"), lambda q, row, n: distillation.jsd(q, plain_teacher(n), 0.5)),
    "skewed_kl": (full("skewed_kl"), lambda q, row, n: distillation.skewed_kl(q, plain_teacher(n), 0.1)),
    "k2, sampled": (
        distill(objective="k2"),
        lambda q, row, n: 0.5 * (chosen(q, row) - chosen(plain_teacher(n), row)).square(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_restricted_distribution(name: str) -> None:
    algorithm, value = CASES[name]
    rows = trajectories()
    found, columns = gradients(batch_of(rows), algorithm.losses, LIMITS)
    assert distance(found, plain_gradients(rows, value)) < 1e-4
    assert all(bool(torch.isfinite(column.values).all()) for column in columns.values())
    assert float(columns["sampler_gap"].values.max()) < 1e-5


def test_a_users_formula_is_restricted_too() -> None:
    """It sees the same value on both sides for ids that were not allowed, so they do not count in any formula."""
    known = dict(OBJECTIVES)
    try:
        register_objective("squares")(lambda q, p, settings: (q - p).square().sum(-1))
        algorithm = full("squares")
        rows = trajectories()
        found, _ = gradients(batch_of(rows), algorithm.losses, LIMITS)
    finally:
        OBJECTIVES.clear()
        OBJECTIVES.update(known)
    expected = plain_gradients(rows, lambda q, row, n: ((q - plain_teacher(n)).square() * inside(row)).sum(-1))
    assert distance(found, expected) < 1e-4


@settings(max_examples=10, deadline=None)
@given(tokens=st.sampled_from([1, 17, 10**6]), logits=st.sampled_from([1, 3, 10**6]), seed=st.integers(0, 100))
def test_splits_do_not_change_the_gradient(tokens: int, logits: int, seed: int) -> None:
    batch, losses = batch_of(trajectories()), full("reverse_kl").losses
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    limits = replace(LIMITS, micro_batch_tokens=tokens, logit_tokens=logits)
    expected, _ = gradients(batch, losses, LIMITS)
    found, _ = gradients(batch.select(order), losses, limits)
    assert distance(found, expected) < 1e-5


def test_a_student_that_equals_its_teacher_has_nothing_to_learn() -> None:
    rows = trajectories()
    batch = batch_of(rows)
    with torch.no_grad():
        hidden = [STUDENT.own_states(row.tokens)[row.mask.nonzero().squeeze(-1) - 1] for row in rows]
    own = Ragged.from_rows(hidden, dtype=torch.float32, trailing=(STUDENT.width,))
    batch = replace(batch, columns={**batch.columns, "teacher_hidden": own})
    for objective in ("reverse_kl", "forward_kl", "jsd", "skewed_kl"):
        algorithm = distill(objective=objective, heads=[head(STUDENT, 0.7)])
        found, columns = gradients(batch, algorithm.losses, LIMITS)
        assert not any(bool(gradient.any()) for gradient in found.values())
        assert bool(columns["settled"].values.all())
        assert not bool(columns["floored"].values.any())


def test_log_probs_below_the_floor_are_counted_among_what_is_allowed() -> None:
    batch = batch_of(trajectories())
    losses = distill(objective="reverse_kl", heads=[head(TEACHER)]).losses
    _, columns = gradients(batch, losses, LIMITS)
    assert not bool(columns["floored"].values.any())
    low = distill(objective="reverse_kl", heads=[head(TEACHER)], settings=Settings(floor=-0.01)).losses
    _, columns = gradients(batch, low, LIMITS)
    assert bool(columns["floored"].values.all())


# ── scores and measures ──────────────────────────────────────────────────────────────────────────────────────────────


def test_engines_score_within_the_constraints_of_a_row() -> None:
    rows = trajectories()
    for number, (row, found) in enumerate(zip(rows, scores(TEACHER, rows), strict=True)):
        torch.testing.assert_close(found, chosen(plain_teacher(number), row), atol=1e-5, rtol=0)


def test_evaluation_measures_what_is_allowed() -> None:
    rows = trajectories()
    batch, limits = batch_of(rows), LIMITS.neutral()
    found = measure(STUDENT, batch, [TeacherMeasures([head(TEACHER)])], limits)
    sampled = measure(STUDENT, batch, [SampledMeasures()], limits)
    for number, row in enumerate(rows):
        with torch.no_grad():
            q, p = plain_log_probs(plain_student(), row, 1.0), plain_teacher(number)
        expected = {
            "kl": (q.exp() * (q - p)).sum(-1),
            "kl_forward": (p.exp() * (p - q)).sum(-1),
            "top1_agreement": (q.argmax(-1) == p.argmax(-1)).float(),
            "entropy": -(q.exp() * q).sum(-1),
        }
        for name, value in expected.items():
            torch.testing.assert_close(found[name].row(number), value, atol=2e-5, rtol=0)
        torch.testing.assert_close(sampled["kl"].row(number), chosen(q, row) - chosen(p, row), atol=2e-5, rtol=0)


def test_the_first_batch_is_compared_with_the_models_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(trajectories())
    found = ReferenceCheck(ReadLogp(), LIMITS)(STUDENT, batch, alone)
    assert found["reference_gap_max"] < 1e-5

    def ignoring(*arguments: Any) -> ModelOut:
        return ModelOut(*arguments[:5])

    monkeypatch.setattr(text, "ModelOut", ignoring)
    with pytest.raises(UserError, match="the learner computes something else than the model"):
        ReferenceCheck(ReadLogp(), LIMITS)(STUDENT, batch, alone)


# ── what cannot be learned from ───────────────────────────────────────────────────────────────────────────────────────


def test_tokens_that_do_not_follow_the_constraint_of_their_row_stop_the_run() -> None:
    batch = batch_of(trajectories())
    spans = [[*row] for row in batch.objects["constraints"][0]]
    moved = [[spans[0][0] - 1, *spans[0][1:]]]
    wrong = replace(batch, objects={"constraints": [moved, *batch.objects["constraints"][1:]]})
    with pytest.raises(UserError, match=r"train/prompt 0/.*its tokens do not follow the constraint of its row"):
        measure(STUDENT, wrong, [ReadLogp()], LIMITS)


@pytest.mark.parametrize("payload", ["top_k", "student_top_k", "union"])
def test_payloads_of_some_tokens_say_what_works(payload: str) -> None:
    refused = distill(objective="reverse_kl", payload=payload).unconstrained
    assert refused.startswith(f"payload {payload} has")
    assert "use payload full" in refused
    assert not distill(objective="reverse_kl", payload="full").unconstrained
    assert not distill(objective="k1", form="policy_gradient").unconstrained
