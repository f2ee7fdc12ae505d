"""Test the distillation algorithm: its payloads, its columns, and that its losses have the claimed gradients.

The hidden states of the student are its logits and its head is the identity, so that expectations over the sampled
token can be enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.algorithms.distill import choose_payload, distill, expand
from tutelage.algorithms.measures import TeacherMeasures
from tutelage.algorithms.objectives import OBJECTIVES, Settings
from tutelage.algorithms.policy import PolicySettings
from tutelage.certify import textbook
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import COLUMNS, Batch
from tutelage.losses import distillation
from tutelage.losses.contract import LossSum, ModelOut

VOCABULARY = 5
DEFAULTS: dict[str, Any] = {
    "objective": "reverse_kl",
    "payload": "auto",
    "form": "supervised",
    "top_k": 2,
}
PAYLOADS = {
    "k1": "sampled",
    "k2": "sampled",
    "k3": "sampled",
    "reverse_kl": "full",
    "forward_kl": "full",
    "jsd": "full",
}
NEEDS = {
    "sampled": {"teacher_logp"},
    "top_k": {"teacher_topk_ids", "teacher_topk_logp", "teacher_logp"},
    "full": {"teacher_hidden", "teacher_index"},
}
SUPERVISED = [("reverse_kl", "full"), ("forward_kl", "full"), ("jsd", "full"), ("forward_kl", "top_k")]


def head(name: str = "main", scale: float = 1.0) -> TeacherHead:
    """A teacher whose logits are its hidden states, scaled: heads that differ give different distributions."""
    return TeacherHead(name, lambda hidden: (scale * hidden).log_softmax(-1))


def build(*, heads: tuple[TeacherHead, ...] = (head(),), **settings: Any) -> Algorithm:
    return distill(**{**DEFAULTS, **settings}, heads=heads)


def random(*shape: int, seed: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def student_out(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> ModelOut:
    return ModelOut(logits, ids, lambda hidden: hidden, temperature)


def columns_for(ids: Tensor, teacher: Tensor, behaviour: Tensor, k: int = 2) -> dict[str, Tensor]:
    """Every column that some payload asks for; `teacher` are logits [actions, vocabulary]."""
    logp = teacher.log_softmax(-1)
    top = logp.topk(k, dim=-1)
    return {
        "behaviour_logp": behaviour,
        "teacher_logp": logp.gather(-1, ids[:, None]).squeeze(-1),
        "teacher_topk_ids": top.indices,
        "teacher_topk_logp": top.values,
        "teacher_hidden": teacher,
        "teacher_index": torch.zeros(len(ids), dtype=torch.int32),
    }


def only(algorithm: Algorithm, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the learner hands to the loss: the columns that the algorithm declared and those that it adds; no others.
    Every action is a row of its own here."""
    needed = {name: value for name, value in columns.items() if name in algorithm.needs}
    if algorithm.over_columns is None:
        return needed
    offsets = torch.arange(len(columns["behaviour_logp"]) + 1)
    ragged = {name: Ragged(value, offsets) for name, value in needed.items()}
    signal = algorithm.over_columns(Batch((), ragged, {}))
    return needed | {name: column.values for name, column in signal.columns.items()}


def evaluate(algorithm: Algorithm, logits: Tensor, ids: Tensor, teacher: Tensor) -> tuple[LossSum, Tensor]:
    """The loss and its gradient by the student's logits; the sampler had the same weights."""
    leaf = logits.clone().requires_grad_()
    behaviour = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    (loss,) = algorithm.losses
    out = loss(student_out(leaf, ids), only(algorithm, columns_for(ids, teacher, behaviour)))
    (slope,) = torch.autograd.grad(out.total, leaf)
    return out, slope


def mean_gradient(algorithm: Algorithm, logits: Tensor, teacher: Tensor) -> Tensor:
    """The expectation over sampled tokens, enumerated: Σ_y q(y) ∇ loss(y), row by row."""
    total = torch.zeros_like(logits)
    for token in range(VOCABULARY):
        ids = torch.full((len(logits),), token)
        total += logits.softmax(-1)[:, token, None] * evaluate(algorithm, logits, ids, teacher)[1]
    return total


def gradient_of(divergence: str, logits: Tensor, teacher: Tensor) -> Tensor:
    """The target: the divergence over the full vocabulary, differentiated."""
    leaf = logits.clone().requires_grad_()
    functions = {"reverse_kl": distillation.reverse_kl, "forward_kl": distillation.forward_kl}
    value = functions[divergence](leaf.log_softmax(-1), teacher.log_softmax(-1))
    return torch.autograd.grad(value.sum(), leaf)[0]


# ── sharp teachers ───────────────────────────────────────────────────────────────────────────────────────────────────

SHARP = 30.0
"""Times the logits of a teacher: its log-probs go down to about −150."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "jsd", "skewed_kl"])
def test_the_full_payload_is_exact_however_sharp_the_teacher(objective: str, seed: int) -> None:
    """Against float64, without a floor. With a floor of −30 the gradient is another, and the first line says so."""
    logits, teacher = random(3, VOCABULARY, seed=seed), SHARP * random(3, VOCABULARY, seed=seed + 50)
    assert float(teacher.log_softmax(-1).min()) < -60
    ids = torch.zeros(3, dtype=torch.int64)
    leaf = logits.double().requires_grad_()
    q, p = leaf.log_softmax(-1), teacher.double().log_softmax(-1)
    term = textbook.DIVERGENCES[objective](q, p, Settings())
    (expected,) = torch.autograd.grad(term.sum(), leaf)
    out, slope = evaluate(build(objective=objective), logits, ids, teacher)
    assert float((slope - expected).norm() / expected.norm()) < 1e-5
    assert float(out.per_action["loss"].sum()) == pytest.approx(float(term.detach().sum()), rel=1e-5)
    assert float(out.per_action["floored"].sum()) == 0
    assert "count as" not in build(objective=objective).note
    if objective == "reverse_kl":
        raised = build(objective=objective, settings=Settings(floor=-30.0))
        out, slope = evaluate(raised, logits, ids, teacher)
        assert float((slope - expected).norm() / expected.norm()) > 1e-2
        assert float(out.per_action["floored"].sum()) > 0
        assert "teacher log-probs below -30 count as -30" in raised.note


@pytest.mark.parametrize("objective", ["k2", "k3"])
def test_estimates_have_their_mean_gradient_however_sharp_the_teacher(objective: str) -> None:
    logits, teacher = random(3, VOCABULARY, seed=1), SHARP * random(3, VOCABULARY, seed=2)
    target = {"k2": "reverse_kl", "k3": "forward_kl"}[objective]
    leaf = logits.double().requires_grad_()
    term = textbook.DIVERGENCES[target](leaf.log_softmax(-1), teacher.double().log_softmax(-1), Settings())
    (expected,) = torch.autograd.grad(term.sum(), leaf)
    found = mean_gradient(build(objective=objective), logits, teacher)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("payload", ["top_k", "student_top_k", "union"])
@pytest.mark.parametrize("k", [2, VOCABULARY])
def test_an_outcome_that_is_not_there_is_not_floored(payload: str, k: int) -> None:
    """Ids that are named twice, and a rest of which nothing is left."""
    logits, teacher = random(4, VOCABULARY, seed=3), random(4, VOCABULARY, seed=4)
    ids, own = torch.zeros(4, dtype=torch.int64), logits.topk(k, dim=-1).indices
    for lowered in (False, True):
        if lowered:
            teacher = teacher.scatter(-1, own[:, :1], -math.inf)
        logp = teacher.log_softmax(-1)
        top = logp.topk(k, dim=-1)
        columns = {
            **columns_for(ids, teacher, torch.zeros(4), k),
            "teacher_topk_logp": top.values,
            "student_topk_ids": own,
            "teacher_given_logp": logp.gather(-1, own),
        }
        (loss,) = build(objective="reverse_kl", payload=payload, top_k=k).losses
        found = loss(student_out(logits, ids), columns)
        named = payload != "top_k" or k == VOCABULARY
        assert found.per_action["floored"].tolist() == [float(lowered and named)] * 4
        assert bool(torch.isfinite(found.total))


def test_a_log_prob_at_the_floor_is_not_below_it() -> None:
    """The floor changes nothing there, so the token does not count as floored."""
    floor, ids = -30.0, torch.zeros(3, dtype=torch.int64)
    columns = {"teacher_logp": torch.tensor([-30.001, floor, -29.999]), "behaviour_logp": torch.zeros(3)}
    (loss,) = build(objective="k2", settings=Settings(floor=floor)).losses
    found = loss(student_out(random(3, VOCABULARY, seed=0), ids), columns).per_action
    assert found["floored"].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(found["loss"], 0.5 * (found["student_logp"] - columns["teacher_logp"].clamp(floor)) ** 2)


# ── what is asked for ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("objective", PAYLOADS)
def test_auto_chooses_the_payload_that_serves_the_objective(objective: str) -> None:
    assert choose_payload(OBJECTIVES[objective], "auto") == PAYLOADS[objective]
    algorithm = build(objective=objective, form="policy_gradient" if objective == "k1" else "supervised")
    assert algorithm.payload == PAYLOADS[objective]
    assert algorithm.top_k == 0
    assert algorithm.note.startswith(f"{objective} (")
    assert f"payload {algorithm.payload}" in algorithm.note


@pytest.mark.parametrize(
    ("objective", "payload"), [("reverse_kl", "full"), ("forward_kl", "top_k"), ("k2", "sampled"), ("k2", "auto")]
)
def test_needs_are_those_of_the_payload(objective: str, payload: str) -> None:
    algorithm = build(objective=objective, payload=payload)
    assert set(algorithm.needs) == {"tokens", "mask", "behaviour_logp"} | NEEDS[algorithm.payload]
    assert set(algorithm.needs) <= COLUMNS.keys()
    assert algorithm.top_k == (2 if payload == "top_k" else 0)
    assert algorithm.over_rows is None
    assert algorithm.over_columns is None


@pytest.mark.parametrize("policy", [PolicySettings(several_updates=True), PolicySettings(importance="truncate")])
def test_log_probs_before_the_updates_are_read_only_for_a_policy_gradient(policy: PolicySettings) -> None:
    assert build(objective="k2", policy=policy).derives == ()
    assert build(objective="k2", policy=policy, task_weight=0.5).derives == ("old_logp",)
    assert build(objective="k1", policy=policy, form="policy_gradient").derives == ("old_logp",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective": "reverse_kl"}, "exact"),
        ({"objective": "forward_kl", "payload": "top_k"}, "lower bound"),
        ({"objective": "k2"}, "reverse KL"),
        ({"objective": "k3"}, "FORWARD KL"),
        ({"objective": "k1"}, "ZERO"),
        ({"objective": "k1", "form": "policy_gradient"}, "later states"),
        ({"objective": "k1", "form": "policy_gradient", "discount": 1}, "whole sequences"),
        ({"objective": "forward_kl_topk"}, "biased"),
    ],
)
def test_the_note_says_what_is_optimised(settings: dict[str, Any], said: str) -> None:
    note = build(**settings).note
    assert said in note
    assert "\n" not in note


# ── supervised ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("objective", "payload"), SUPERVISED)
@pytest.mark.parametrize("token", range(VOCABULARY))
def test_supervised_is_the_divergence_whatever_token_was_taken(objective: str, payload: str, token: int) -> None:
    logits, teacher = random(3, VOCABULARY, seed=0), random(3, VOCABULARY, seed=1)
    ids = torch.full((3,), token)
    out, slope = evaluate(
        build(objective=objective, payload=payload, settings=Settings(beta=0.3)), logits, ids, teacher
    )
    leaf = logits.clone().requires_grad_()
    q, p = leaf.log_softmax(-1), teacher.log_softmax(-1)
    if payload == "top_k":
        expected = distillation.forward_kl(
            distillation.buckets(q, p.topk(2).indices), distillation.teacher_buckets(p.topk(2).values, None, VOCABULARY)
        )
    elif objective == "jsd":
        expected = distillation.jsd(q, p, 0.3)
    else:
        expected = {"reverse_kl": distillation.reverse_kl, "forward_kl": distillation.forward_kl}[objective](q, p)
    torch.testing.assert_close(out.total, expected.sum())
    torch.testing.assert_close(out.per_action["loss"], expected.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), leaf)[0])


def test_forward_kl_topk_compares_the_log_probs_of_the_named_tokens() -> None:
    logits, teacher, ids = random(3, VOCABULARY, seed=0), random(3, VOCABULARY, seed=1), torch.tensor([0, 1, 2])
    out, _ = evaluate(build(objective="forward_kl_topk"), logits, ids, teacher)
    q, p = logits.log_softmax(-1).tolist(), teacher.log_softmax(-1).tolist()
    best = [sorted(range(VOCABULARY), key=lambda token: -p[row][token])[:2] for row in range(3)]
    terms = [sum(math.exp(p[row][at]) * (p[row][at] - q[row][at]) for at in best[row]) for row in range(3)]
    assert max(terms) > 0, "not all sums are clamped"
    torch.testing.assert_close(out.per_action["divergence"], torch.tensor(terms).clamp(0, 10))


@pytest.mark.parametrize(("objective", "target"), [("k2", "reverse_kl"), ("k3", "forward_kl")])
def test_supervised_estimates_have_the_stated_mean_gradient(objective: str, target: str) -> None:
    logits, teacher = random(3, VOCABULARY, seed=0), random(3, VOCABULARY, seed=1)
    mean = mean_gradient(build(objective=objective), logits, teacher)
    torch.testing.assert_close(mean, gradient_of(target, logits, teacher), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("objective", "payload"), [*SUPERVISED, ("k2", "sampled"), ("k3", "sampled")])
def test_no_gradient_when_the_student_is_the_teacher(objective: str, payload: str) -> None:
    logits = random(6, VOCABULARY, seed=3)
    out, slope = evaluate(build(objective=objective, payload=payload), logits, torch.arange(6) % VOCABULARY, logits)
    assert float(slope.abs().max()) < 1e-6
    assert abs(float(out.total.detach())) < 1e-5


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_the_same_model_computed_in_another_way_gives_exactly_no_gradient_whatever_its_tail(objective: str) -> None:
    """Where the named tokens leave almost nothing, what they leave is rounding: it must not count as a difference."""
    logits = 4 * random(500, 4096, seed=5)
    ids = torch.zeros(500, dtype=torch.int64)
    top = logits.double().log_softmax(-1).float().topk(32, dim=-1)  # the sums are taken in another order and precision
    columns = {
        "teacher_logp": logits.log_softmax(-1)[:, 0],
        "behaviour_logp": logits.log_softmax(-1)[:, 0],
        "teacher_topk_ids": top.indices,
        "teacher_topk_logp": top.values,
    }
    (loss,) = build(objective=objective, payload="top_k", top_k=32).losses
    leaf = logits.clone().requires_grad_()
    out = loss(student_out(leaf, ids), columns)
    (slope,) = torch.autograd.grad(out.total, leaf)
    assert float((1 - top.values.exp().sum(-1)).min()) < 1e-4, "some tails are tiny"
    assert torch.equal(out.per_action["settled"], torch.ones(500))
    assert torch.equal(slope, torch.zeros_like(slope))


def test_temperature_is_the_students_alone() -> None:
    """The student's distribution is the tempered one; what the teacher sent is taken as it is."""
    logits, teacher, ids = random(3, VOCABULARY, seed=0), random(3, VOCABULARY, seed=1), torch.tensor([0, 1, 2])
    algorithm = build(objective="reverse_kl")
    columns = only(algorithm, columns_for(ids, teacher, torch.zeros(3)))
    out = algorithm.losses[0](student_out(logits, ids, temperature=0.5), columns)
    expected = distillation.reverse_kl((logits / 0.5).log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(out.per_action["divergence"], expected)
    chosen = (logits / 0.5).log_softmax(-1)[torch.arange(3), ids]
    torch.testing.assert_close(out.per_action["student_logp"], chosen)


# ── policy gradient ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_k1_as_advantage_follows_reverse_kl() -> None:
    logits, teacher = random(3, VOCABULARY, seed=0), random(3, VOCABULARY, seed=1)
    mean = mean_gradient(build(objective="k1", form="policy_gradient"), logits, teacher)
    torch.testing.assert_close(mean, gradient_of("reverse_kl", logits, teacher), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", ["k2", "k3"])
def test_other_estimates_as_advantage_weigh_the_score_function(objective: str) -> None:
    """Σ q(y) k(y) ∇ log q(y), with k held fixed."""
    logits, teacher = random(3, VOCABULARY, seed=0), random(3, VOCABULARY, seed=1)
    leaf = logits.clone().requires_grad_()
    q = leaf.log_softmax(-1)
    fixed = {"k2": distillation.k2, "k3": distillation.k3}[objective](q, teacher.log_softmax(-1)).detach()
    (expected,) = torch.autograd.grad((q.exp().detach() * fixed * q).sum(), leaf)
    mean = mean_gradient(build(objective=objective, form="policy_gradient"), logits, teacher)
    torch.testing.assert_close(mean, expected, atol=1e-5, rtol=1e-4)


def test_policy_gradient_clips_by_the_behaviour_log_probs() -> None:
    logits, ids = torch.zeros(3, VOCABULARY), torch.tensor([0, 0, 0])
    leaf = logits.clone().requires_grad_()
    teacher = logits.clone()
    teacher[0, 0], teacher[1:, 0] = 3.0, -3.0  # token 0 is too rare in row 0, too frequent in rows 1 and 2
    own = float(logits.log_softmax(-1)[0, 0])
    behaviour = torch.tensor([own - 1.0, own + 1.0, own - 2.0])  # ratios e, 1/e, e²
    algorithm = build(objective="k1", form="policy_gradient", policy=PolicySettings(0.2, 0.2, 3.0))
    out = algorithm.losses[0](student_out(leaf, ids), only(algorithm, columns_for(ids, teacher, behaviour)))
    advantage = -out.per_action["divergence"]
    assert float(advantage[0]) > 0 > float(advantage[1])
    assert out.per_action["clipped"].tolist() == [1.0, 1.0, 0.0]
    assert out.per_action["dual_clipped"].tolist() == [0.0, 0.0, 1.0]
    expected = torch.stack([-1.2 * advantage[0], -0.8 * advantage[1], -3.0 * advantage[2]])
    torch.testing.assert_close(out.per_action["loss"], expected)
    assert float(torch.autograd.grad(out.total, leaf)[0].abs().max()) == 0.0


# ── several teachers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("index", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 2], [2, 1, 1, 0]])
def test_every_action_is_judged_by_its_own_teacher(index: list[int]) -> None:
    heads = (head("a", 1.0), head("b", 2.0), head("c", -1.0))
    hidden = random(4, VOCABULARY, seed=5)
    expanded = expand(heads, hidden, torch.tensor(index, dtype=torch.int32))
    expected = torch.stack([heads[i].log_probs(hidden[row]) for row, i in enumerate(index)])
    torch.testing.assert_close(expanded, expected)
    algorithm = build(objective="forward_kl", heads=heads)
    logits, ids = random(4, VOCABULARY, seed=6), torch.tensor([0, 1, 2, 3])
    columns = columns_for(ids, hidden, torch.zeros(4)) | {"teacher_index": torch.tensor(index, dtype=torch.int32)}
    out = algorithm.losses[0](student_out(logits, ids), only(algorithm, columns))
    torch.testing.assert_close(out.per_action["divergence"], distillation.forward_kl(logits.log_softmax(-1), expected))
    torch.testing.assert_close(out.per_action["teacher_logp"], expected[torch.arange(4), ids])


def test_a_head_sees_its_own_actions_only_and_no_gradient() -> None:
    seen: list[tuple[str, int]] = []

    def watching(name: str) -> TeacherHead:
        def log_probs(hidden: Tensor) -> Tensor:
            seen.append((name, len(hidden)))
            assert not torch.is_grad_enabled()
            return hidden.log_softmax(-1)

        return TeacherHead(name, log_probs)

    expand((watching("a"), watching("b")), random(4, VOCABULARY, seed=0), torch.tensor([1, 0, 1, 1]))
    expand((watching("a"), watching("b")), random(4, VOCABULARY, seed=0), torch.tensor([1, 1, 1, 1]))
    assert seen == [("a", 1), ("b", 3), ("b", 4)]


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────

COMMON = {"loss", "divergence", "student_logp", "entropy", "sampler_gap"}
TAUGHT = {"teacher_logp", "settled", "floored"}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"objective": "reverse_kl"}, TAUGHT),
        ({"objective": "k2"}, TAUGHT),
        ({"objective": "forward_kl", "payload": "top_k"}, {*TAUGHT, "teacher_mass", "student_mass", "overlap"}),
        (
            {"objective": "k1", "form": "policy_gradient"},
            {"clipped", "dual_clipped", "overflowed", "ratio", "advantage", "teacher_logp"},
        ),
    ],
)
def test_every_metric_is_there_per_action_and_without_gradient(settings: dict[str, Any], more: set[str]) -> None:
    logits, teacher = random(4, VOCABULARY, seed=0), random(4, VOCABULARY, seed=1)
    ids = torch.tensor([0, 4, 2, 2])
    out, _ = evaluate(build(**settings), logits, ids, teacher)
    assert set(out.per_action) == COMMON | more
    for name, values in out.per_action.items():
        assert values.shape == (4,), name
        assert not values.requires_grad, name
    torch.testing.assert_close(out.per_action["loss"].sum(), out.total.detach())
    p, q = teacher.log_softmax(-1), logits.log_softmax(-1)
    torch.testing.assert_close(out.per_action["teacher_logp"], p[torch.arange(4), ids])
    torch.testing.assert_close(out.per_action["student_logp"], q[torch.arange(4), ids])
    torch.testing.assert_close(out.per_action["entropy"], torch.distributions.Categorical(logits=logits).entropy())
    assert float(out.per_action["sampler_gap"].max()) < 1e-6
    if "teacher_mass" in more:
        top = p.topk(2)
        torch.testing.assert_close(out.per_action["teacher_mass"], top.values.exp().sum(-1))
        torch.testing.assert_close(out.per_action["student_mass"], q.gather(-1, top.indices).exp().sum(-1))


def test_the_mass_on_the_named_tokens_counts_each_once() -> None:
    """In a union, tokens that both sides name are listed twice: here none, one and both of two."""
    logits = torch.tensor([[3.0, 2.0, 0.0, 0.0, 0.0]] * 3)
    teacher = torch.tensor([[0.0, 0.0, 3.0, 2.0, 0.0], [3.0, 0.0, 2.0, 0.0, 0.0], [2.0, 3.0, 0.0, 0.0, 0.0]])
    named = [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
    ids, own, p, q = torch.zeros(3, dtype=torch.int64), logits.topk(2).indices, teacher.softmax(-1), logits.softmax(-1)
    columns = {
        **columns_for(ids, teacher, torch.zeros(3)),
        "student_topk_ids": own,
        "teacher_given_logp": p.log().gather(-1, own),
    }
    (loss,) = build(payload="union").losses
    found = loss(student_out(logits, ids), columns).per_action
    assert found["overlap"].tolist() == [0.0, 0.5, 1.0]
    for row, tokens in enumerate(named):
        assert float(found["teacher_mass"][row]) == pytest.approx(float(p[row, tokens].sum()), abs=1e-6)
        assert float(found["student_mass"][row]) == pytest.approx(float(q[row, tokens].sum()), abs=1e-6)


def test_the_sampler_gap_is_the_distance_to_the_behaviour() -> None:
    logits, ids = random(3, VOCABULARY, seed=0), torch.tensor([0, 1, 2])
    own = logits.log_softmax(-1)[torch.arange(3), ids]
    algorithm = build()
    columns = only(algorithm, columns_for(ids, logits, own + torch.tensor([0.0, 0.5, -0.25])))
    gap = algorithm.losses[0](student_out(logits, ids), columns).per_action["sampler_gap"]
    torch.testing.assert_close(gap, torch.tensor([0.0, 0.5, 0.25]), atol=1e-6, rtol=0)


def test_measures_are_those_of_the_full_vocabulary() -> None:
    logits, teacher = random(4, VOCABULARY, seed=0), random(4, VOCABULARY, seed=1)
    teacher[0] = logits[0] * 2  # agree on the best token, not on the distribution
    ids = torch.tensor([0, 1, 2, 3])
    out = TeacherMeasures((head(),))(student_out(logits, ids), columns_for(ids, teacher, torch.zeros(4)))
    q, p = logits.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(out.per_action["kl"], distillation.reverse_kl(q, p))
    torch.testing.assert_close(out.per_action["kl_forward"], distillation.forward_kl(q, p))
    torch.testing.assert_close(out.per_action["entropy"], torch.distributions.Categorical(logits=logits).entropy())
    assert torch.equal(out.per_action["top1_agreement"], (logits.argmax(-1) == teacher.argmax(-1)).float())
    assert float(out.per_action["top1_agreement"][0]) == 1.0
    torch.testing.assert_close(out.total, out.per_action["kl"].sum())
