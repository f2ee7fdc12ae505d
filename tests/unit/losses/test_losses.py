"""Test divergences and the clipped policy gradient against plain formulas, enumeration and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from tutelage.losses.distillation import (
    FLOOR,
    RATIO_LIMIT,
    buckets,
    contained,
    forward_kl,
    forward_kl_topk,
    jsd,
    k1,
    k2,
    k3,
    repeats,
    reverse_kl,
    teacher_buckets,
)
from tutelage.losses.policy_gradient import dual_clip

Full = Callable[[Tensor, Tensor], Tensor]
"""(student log-probs, teacher log-probs), both [actions, vocabulary], → [actions]"""
VOCABULARY = 7
FULL: dict[str, Full] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd_0.5": partial(jsd, beta=0.5),
    "jsd_0.1": partial(jsd, beta=0.1),
}
full = pytest.mark.parametrize("divergence", FULL.values(), ids=FULL.keys())


def forward_kl_top_k(student: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Forward KL over the named ids and a bucket for the rest."""
    return forward_kl(buckets(student, ids), teacher_buckets(teacher, None, student.shape[-1]))


def best(teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of the teacher's k most likely tokens."""
    top = teacher.topk(k, dim=-1)
    return top.indices, top.values


def top_k(student: Tensor, teacher: Tensor, k: int) -> Tensor:
    return forward_kl_top_k(student, *best(teacher, k))


ALL: dict[str, Full] = {**FULL, "top_1": partial(top_k, k=1), "top_3": partial(top_k, k=3)}
every = pytest.mark.parametrize("divergence", ALL.values(), ids=ALL.keys())


def logits(actions: int = 4, vocabulary: int = VOCABULARY, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(actions, vocabulary, generator=generator, dtype=torch.float64)


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probs of a student and a teacher that differ."""
    return logits(seed=2 * seed).log_softmax(-1), logits(seed=2 * seed + 1).log_softmax(-1)


def gradient(divergence: Full, student_logits: Tensor, teacher: Tensor) -> Tensor:
    """With respect to the student's logits, through log_softmax."""
    leaf = student_logits.clone().requires_grad_()
    divergence(leaf.log_softmax(-1), teacher).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def plain_kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(3))
def test_values_equal_the_formulas_written_out(seed: int) -> None:
    student, teacher = pair(seed)
    for row in range(len(student)):
        q, p = student[row].exp().tolist(), teacher[row].exp().tolist()
        mixture = [0.3 * a + 0.7 * b for a, b in zip(p, q, strict=True)]
        expected = {
            reverse_kl(student, teacher)[row]: plain_kl(q, p),
            forward_kl(student, teacher)[row]: plain_kl(p, q),
            jsd(student, teacher, 0.3)[row]: 0.3 * plain_kl(p, mixture) + 0.7 * plain_kl(q, mixture),
        }
        order = sorted(range(VOCABULARY), key=lambda i: -p[i])
        for k in (1, 3, VOCABULARY - 1):
            named, rest = order[:k], order[k:]
            buckets_p = [*(p[i] for i in named), math.fsum(p[i] for i in rest)]
            buckets_q = [*(q[i] for i in named), math.fsum(q[i] for i in rest)]
            expected[top_k(student, teacher, k)[row]] = plain_kl(buckets_p, buckets_q)
        for value, target in expected.items():
            assert float(value) == pytest.approx(target, rel=1e-12)


def test_values_equal_torch() -> None:
    student, teacher = pair()
    q, p = Categorical(logits=student), Categorical(logits=teacher)
    torch.testing.assert_close(reverse_kl(student, teacher), kl_divergence(q, p))
    torch.testing.assert_close(forward_kl(student, teacher), kl_divergence(p, q))
    # F.kl_div(input, target) is KL(target‖input)
    torch.testing.assert_close(
        forward_kl(student, teacher).sum(), F.kl_div(student, teacher, reduction="sum", log_target=True)
    )
    torch.testing.assert_close(
        reverse_kl(student, teacher).sum(), F.kl_div(teacher, student, reduction="sum", log_target=True)
    )


@every
def test_one_value_for_each_action(divergence: Full) -> None:
    student, teacher = pair()
    whole = divergence(student, teacher)
    assert whole.shape == (4,)
    assert divergence(student[:0], teacher[:0]).shape == (0,)
    for row in range(4):
        torch.testing.assert_close(divergence(student[row : row + 1], teacher[row : row + 1])[0], whole[row])


@every
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 12.0))
def test_never_negative_and_zero_only_if_equal(divergence: Full, seed: int, scale: float) -> None:
    teacher = logits(seed=seed, scale=scale).log_softmax(-1)
    student = logits(seed=seed + 1, scale=scale).log_softmax(-1)
    values = divergence(student, teacher)
    assert bool((values > -1e-12).all())
    assert bool((divergence(teacher, teacher).abs() < 1e-12).all())
    apart = (student.exp() - teacher.exp()).abs().max(-1).values > 0.05
    ids = teacher.argmax(-1, keepdim=True)
    apart &= (student.gather(-1, ids).exp() - teacher.gather(-1, ids).exp()).abs().squeeze(-1) > 0.05
    assert bool((values[apart] > 1e-6).all())


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


@every
@pytest.mark.parametrize("seed", range(3))
def test_gradients_by_finite_differences(divergence: Full, seed: int) -> None:
    teacher = logits(seed=2 * seed + 1).log_softmax(-1)
    leaf = logits(seed=2 * seed).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: divergence(x.log_softmax(-1), teacher), (leaf,))


@pytest.mark.parametrize("estimate", [k1, k2, k3])
def test_gradients_of_sampled_estimates_by_finite_differences(estimate: Full) -> None:
    leaf = torch.tensor([-0.2, -1.5, -4.0, -9.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-1.2, -1.4, -0.5, -0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: estimate(x, teacher), (leaf,))


@every
def test_gradient_is_zero_where_student_and_teacher_agree(divergence: Full) -> None:
    same = logits()
    assert float(gradient(divergence, same, same.log_softmax(-1)).abs().max()) < 1e-14
    single = same.float()
    assert float(gradient(divergence, single, single.log_softmax(-1)).abs().max()) < 1e-6


@full
def test_descent_reaches_the_teacher(divergence: Full) -> None:
    teacher = logits(actions=1, scale=1.0).log_softmax(-1)
    student = logits(actions=1, seed=1, scale=1.0)
    for _ in range(500):
        student = student - 2.0 * gradient(divergence, student, teacher)
    assert float((student.log_softmax(-1).exp() - teacher.exp()).abs().max()) < 5e-3


def test_forward_kl_gradient_is_q_minus_p() -> None:
    student, teacher = logits(), logits(seed=1).log_softmax(-1)
    torch.testing.assert_close(gradient(forward_kl, student, teacher), student.softmax(-1) - teacher.exp())


# ── jsd ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jsd_is_symmetric_at_one_half_and_bounded() -> None:
    student, teacher = pair()
    torch.testing.assert_close(jsd(student, teacher, 0.5), jsd(teacher, student, 0.5))
    torch.testing.assert_close(jsd(student, teacher, 0.2), jsd(teacher, student, 0.8))
    far = torch.tensor([[400.0, 0, 0]]).log_softmax(-1), torch.tensor([[0, 400.0, 0]]).log_softmax(-1)
    assert float(jsd(*far, 0.5)) == pytest.approx(math.log(2))


def test_jsd_limits_are_the_two_kl() -> None:
    """JSD_β/β → KL(p‖q) as β → 0, JSD_β/(1 − β) → KL(q‖p) as β → 1."""
    student, teacher = pair()
    torch.testing.assert_close(jsd(student, teacher, 1e-7) / 1e-7, forward_kl(student, teacher), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        jsd(student, teacher, 1 - 1e-7) / 1e-7, reverse_kl(student, teacher), rtol=1e-4, atol=1e-6
    )


# ── top k ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(seed=st.integers(0, 10_000), k=st.integers(1, VOCABULARY), scale=st.floats(0.1, 8.0))
def test_top_k_is_a_lower_bound_that_grows_with_k(seed: int, k: int, scale: float) -> None:
    teacher = logits(seed=seed, scale=scale).log_softmax(-1)
    student = logits(seed=seed + 1, scale=scale).log_softmax(-1)
    exact = forward_kl(student, teacher)
    value = top_k(student, teacher, k)
    assert bool((value <= exact + 1e-9).all())
    assert bool((value >= -1e-9).all())
    if k > 1:
        assert bool((value >= top_k(student, teacher, k - 1) - 1e-9).all())
    if k == VOCABULARY:
        torch.testing.assert_close(value, exact, atol=1e-9, rtol=1e-9)


def test_top_k_looks_at_the_named_ids() -> None:
    """The same teacher log-probs under other ids are another divergence; the order of ids does not matter."""
    student, teacher = pair()
    ids, logp = best(teacher, 3)
    shuffled = torch.tensor([2, 0, 1])
    torch.testing.assert_close(
        forward_kl_top_k(student, ids[:, shuffled], logp[:, shuffled]), forward_kl_top_k(student, ids, logp)
    )
    other = (ids + 1) % VOCABULARY
    assert float((forward_kl_top_k(student, other, logp) - forward_kl_top_k(student, ids, logp)).abs().min()) > 1e-3


@pytest.mark.parametrize("gap", [5.0, 30.0, 90.0, 1000.0])
def test_top_k_pulls_a_named_token_up_however_unlikely_it_is(gap: float) -> None:
    """The student gives its all to token 1, the teacher wants token 0."""
    teacher = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).log()
    slope = gradient(partial(top_k, k=1), torch.tensor([[-gap, gap, -gap, -gap]]), teacher)
    assert float(slope[0, 0]) < -0.6
    assert float(slope[0, 1]) > 0.6


@pytest.mark.parametrize("gap", [3.0, 10.0, 50.0, 1000.0])
def test_top_k_pulls_the_rest_up_however_little_the_student_leaves_it(gap: float) -> None:
    """Teacher: 0.35, 0.35 and 0.3 for the rest. Student: one half each on the named tokens, next to nothing beside."""
    named = torch.tensor([[0.35, 0.35]]).log()
    leaf = torch.tensor([[gap, gap, -gap, -gap]], requires_grad=True)
    value = forward_kl_top_k(leaf.log_softmax(-1), torch.tensor([[0, 1]]), named)
    value.sum().backward()
    assert leaf.grad is not None
    rest = -2 * gap - math.log1p(math.exp(-2 * gap))
    expected = 0.7 * math.log(0.7) + 0.3 * (math.log(0.3) - rest) + 0.7 * math.log1p(math.exp(-2 * gap))
    assert float(value.detach()) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(leaf.grad, torch.tensor([[0.15, 0.15, -0.15, -0.15]]), atol=2e-3, rtol=0)


def test_nothing_is_left_for_the_rest_if_every_id_is_named() -> None:
    student, teacher = pair()
    ids = torch.arange(VOCABULARY).flip(0).expand(len(student), -1)
    found = buckets(student, ids)
    assert torch.equal(found[:, :-1], student.flip(-1))
    assert bool((found[:, -1].exp() == 0).all())
    value = reverse_kl(found, teacher_buckets(teacher.flip(-1), None, VOCABULARY))
    torch.testing.assert_close(value, reverse_kl(student, teacher))


def test_as_many_ids_as_the_vocabulary_leave_a_rest_if_some_are_repeated() -> None:
    student, _ = pair()
    ids = torch.tensor([[*range(VOCABULARY - 1), 0]]).expand(len(student), -1)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, -1] = True
    found = buckets(student, ids, repeated)
    assert bool((found[:, -2].exp() == 0).all())
    torch.testing.assert_close(found[:, -1], student[:, -1])
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(student), dtype=torch.float64))


# ── the sampled token: expectations by enumeration ───────────────────────────────────────────────────────────────────


def mean_gradient(estimate: Full, student_logits: Tensor, teacher: Tensor) -> Tensor:
    """Σ over tokens y of q(y) · ∇ estimate(log q(y), log p(y)): what sampling gives on average."""
    total = torch.zeros_like(student_logits)
    for token in range(student_logits.shape[-1]):
        leaf = student_logits.clone().requires_grad_()
        logp = leaf.log_softmax(-1)[:, token]
        estimate(logp, teacher[:, token]).sum().backward()
        assert leaf.grad is not None
        total += student_logits.softmax(-1)[:, token, None] * leaf.grad
    return total


@pytest.mark.parametrize("seed", range(3))
def test_mean_gradients_of_k1_k2_k3(seed: int) -> None:
    student, teacher = logits(seed=2 * seed), logits(seed=2 * seed + 1).log_softmax(-1)
    reverse, forward = gradient(reverse_kl, student, teacher), gradient(forward_kl, student, teacher)
    assert float(mean_gradient(k1, student, teacher).abs().max()) < 1e-12
    torch.testing.assert_close(mean_gradient(k2, student, teacher), reverse)
    torch.testing.assert_close(mean_gradient(k3, student, teacher), forward)
    assert float((reverse - forward).abs().max()) > 1e-2


def test_k1_as_policy_gradient_follows_reverse_kl() -> None:
    student, teacher = logits(), logits(seed=1).log_softmax(-1)

    def form(logp: Tensor, teacher_logp: Tensor) -> Tensor:
        return dual_clip(logp, logp.detach(), -k1(logp, teacher_logp).detach(), clip=0.2, dual=1e6).loss

    torch.testing.assert_close(mean_gradient(form, student, teacher), gradient(reverse_kl, student, teacher))


def test_mean_values_of_k1_and_k3_are_reverse_kl() -> None:
    student, teacher = pair()
    for estimate in (k1, k3):
        mean = (student.exp() * estimate(student, teacher)).sum(-1)
        torch.testing.assert_close(mean, reverse_kl(student, teacher))
    assert bool((k2(student, teacher) >= 0).all())
    assert bool((k3(student, teacher) >= 0).all())


@pytest.mark.parametrize("gap", [3.0, 14.0, 29.0, 40.0, 200.0, 1e4])
def test_k3_has_a_gradient_however_far_the_ratio(gap: float) -> None:
    leaf = torch.tensor([-gap], requires_grad=True)
    k3(leaf, torch.tensor([0.0])).sum().backward()
    assert leaf.grad is not None
    assert float(leaf.grad) == pytest.approx(1 - math.exp(min(gap, RATIO_LIMIT)), rel=1e-5)


def test_k3_follows_its_tangent_above_a_log_ratio_of_30() -> None:
    """e^r − 1 − r up to 30; from there r costs as much per nat as it does at 30."""
    ratios = torch.tensor([29.0, 30.0, 31.0, 70.0], dtype=torch.float64)
    slope = math.exp(30.0)
    expected = [math.exp(29.0) - 30, slope - 31, 2 * slope - 32, 41 * slope - 71]
    torch.testing.assert_close(k3(-ratios, torch.zeros_like(ratios)), torch.tensor(expected, dtype=torch.float64))


# ── extremes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

extreme = st.one_of(st.floats(-4, 4, width=32), st.sampled_from([-1e4, -200.0, -104.0, 0.0, 104.0, 200.0, 1e4]))
excluding = st.one_of(extreme, st.just(-math.inf))


@st.composite
def extremes(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Student logits, teacher log-probs: one row of 5 tokens; the teacher keeps one token at least."""
    student = [draw(extreme) for _ in range(5)]
    teacher = [draw(extreme), *(draw(excluding) for _ in range(4))]
    return torch.tensor([student]), torch.tensor([teacher]).log_softmax(-1)


@every
@given(case=extremes())
def test_extreme_logits_give_finite_values_and_gradients(divergence: Full, case: tuple[Tensor, Tensor]) -> None:
    student, teacher = case
    value = divergence(student.log_softmax(-1), teacher)
    assert bool(torch.isfinite(value).all())
    assert float(value) > -1e-5
    assert bool(torch.isfinite(gradient(divergence, student, teacher)).all())


@pytest.mark.parametrize("estimate", [k1, k2, k3])
@given(case=extremes(), token=st.integers(0, 4))
def test_extreme_logits_of_the_sampled_token(estimate: Full, case: tuple[Tensor, Tensor], token: int) -> None:
    student, teacher = case
    leaf = student.clone().requires_grad_()
    value = estimate(leaf.log_softmax(-1)[:, token], teacher[:, token])
    value.sum().backward()
    assert leaf.grad is not None
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(leaf.grad).all())


def test_an_excluded_token_costs_a_bounded_amount() -> None:
    """The teacher excludes what the student is sure of."""
    student, teacher = torch.tensor([[50.0, 0.0]]), torch.tensor([[-math.inf, 0.0]])
    assert float(reverse_kl(student.log_softmax(-1), teacher)) == pytest.approx(-FLOOR)
    assert float(forward_kl(student.log_softmax(-1), teacher)) == pytest.approx(50.0)
    slope = gradient(reverse_kl, torch.tensor([[1.0, 0.0]]), teacher)
    assert float(slope[0, 0]) > 1.0
    assert float(slope[0, 1]) < -1.0


# ── the clipped policy gradient ──────────────────────────────────────────────────────────────────────────────────────


def scalar_dual_clip(ratio: float, advantage: float, clip: float, dual: float) -> tuple[float, float, bool, bool]:
    """Loss, its derivative by the ratio, and the two flags, by cases."""
    if advantage >= 0:
        if ratio > 1 + clip:
            return -advantage * (1 + clip), 0.0, advantage > 0, False
        return -advantage * ratio, -advantage, False, False
    if ratio < 1 - clip:
        return -advantage * (1 - clip), 0.0, True, False
    if ratio > dual:
        return -advantage * dual, 0.0, False, True
    return -advantage * ratio, -advantage, False, False


@pytest.mark.parametrize(("clip", "dual"), [(0.2, 3.0), (0.05, 1.5), (0.9, 10.0), (1.5, 2.0)])
def test_dual_clip_against_a_scalar_reference(clip: float, dual: float) -> None:
    ratios = [0.0101, 0.3, 0.77, 0.801, 0.96, 1.0, 1.04, 1.19, 1.21, 1.6, 2.4, 2.9, 3.1, 9.0, 40.0]
    cases = [(ratio, advantage) for ratio in ratios for advantage in (-2.0, -0.1, 0.0, 0.1, 3.0)]
    old = torch.linspace(-5, -0.1, len(cases), dtype=torch.float64)
    ratio, advantage = torch.tensor(cases, dtype=torch.float64).unbind(-1)
    logp = (old + ratio.log()).requires_grad_()
    out = dual_clip(logp, old, advantage, clip, dual)
    out.loss.sum().backward()
    assert logp.grad is not None
    for i, (r, a) in enumerate(cases):
        loss, slope, clipped, dual_clipped = scalar_dual_clip(r, a, clip, dual)
        assert float(out.loss[i].detach()) == pytest.approx(loss, rel=1e-9), (r, a)
        assert float(logp.grad[i]) == pytest.approx(slope * r, rel=1e-9, abs=1e-12), (r, a)
        assert (bool(out.clipped[i]), bool(out.dual_clipped[i])) == (clipped, dual_clipped), (r, a)
    assert not out.clipped.requires_grad
    assert not out.dual_clipped.requires_grad


def test_the_flags_say_where_the_gradient_is_gone() -> None:
    logp = torch.linspace(-3, 3, 61, dtype=torch.float64).repeat(2).requires_grad_()
    advantage = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat_interleave(61)
    out = dual_clip(logp, torch.zeros(122, dtype=torch.float64), advantage, 0.2, 3.0)
    out.loss.sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad == 0, out.clipped | out.dual_clipped)
    assert not bool((out.clipped & out.dual_clipped).any())


# ── which ids two rows share ─────────────────────────────────────────────────────────────────────────────────────────


@given(seed=st.integers(0, 10**6), first=st.integers(1, 9), second=st.integers(1, 9), actions=st.integers(0, 5))
def test_contained_is_membership_row_by_row(seed: int, first: int, second: int, actions: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids, among = (
        torch.stack([torch.randperm(12, generator=generator)[:k] for _ in range(actions)])
        if actions
        else torch.empty(0, k, dtype=torch.int64)
        for k in (first, second)
    )
    expected = [[i in row for i in own] for own, row in zip(ids.tolist(), among.tolist(), strict=True)]
    assert contained(ids, among.int()).tolist() == expected
    assert repeats(among, ids).tolist() == [[False] * second + row for row in expected]


class _Largest(TorchDispatchMode):
    """Watches how large the tensors are that operations make."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_shared_ids_need_memory_for_k_not_for_its_square() -> None:
    ids = torch.arange(1000).expand(2, -1)
    with _Largest() as largest:
        contained(ids, ids + 500)
        repeats(ids, ids + 500)
    assert 0 < largest.elements <= 2 * 2000


def test_verls_top_k_takes_neither_log_prob_below_minus_ten() -> None:
    student, teacher = torch.tensor([[-12.0, -1.0]]), torch.tensor([[-0.5, -14.0]])
    expected = math.exp(-0.5) * (-0.5 + 10.0) + math.exp(-10.0) * (-10.0 + 1.0)
    assert float(forward_kl_topk(student.double(), teacher.double())) == pytest.approx(expected, rel=1e-9)
