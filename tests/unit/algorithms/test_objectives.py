"""Test the registry of objectives: their formulas, and that each claim holds for its mean gradient.

Expectations over the sampled token are enumerated over a small vocabulary, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tutelage.algorithms import objectives
from tutelage.algorithms.objectives import OBJECTIVES, Claim, Form, Objective, Settings, register_objective
from tutelage.certify import textbook
from tutelage.config.objectives import OBJECTIVES as KNOWN
from tutelage.config.schema import Distill

SETTINGS = Settings(beta=0.3, alpha=0.2)
EXACT, BIASED = 1e-9, 1e-2
TOKENS = [name for name, known in KNOWN.items() if known.sees == "token"]
FORMS: tuple[Form, Form] = ("supervised", "policy_gradient")


def random(seed: int) -> Tensor:
    """Logits of four states. Some tokens that one side likes are rare on the other."""
    return 4 * torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STUDENT, TEACHER = random(0), random(1).log_softmax(-1)


def mean_gradient(objective: Objective, form: Form) -> Tensor:
    """The gradient by the student's logits, averaged over the tokens that the student draws."""
    leaf = STUDENT.clone().requires_grad_()
    q = leaf.log_softmax(-1)
    if objective.sees == "token":
        value = objective.formula(q.flatten(), TEACHER.flatten(), SETTINGS).view_as(q)
        mean = q.exp().detach() * (value if form == "supervised" else value.detach() * q)
    elif objective.sees == "top_k":
        ids = TEACHER.topk(2, dim=-1).indices
        mean = objective.formula(q.gather(-1, ids), TEACHER.gather(-1, ids), SETTINGS)
    else:
        mean = objective.formula(q, TEACHER, SETTINGS)
    return torch.autograd.grad(mean.sum(), leaf)[0]


def gradient_of(divergence: str) -> Tensor:
    """The gradient of a textbook divergence, or of the difference of two."""
    leaf = STUDENT.clone().requires_grad_()
    first, _, second = divergence.partition("-")
    value = textbook.DIVERGENCES[first](leaf.log_softmax(-1), TEACHER, SETTINGS).sum()
    if second:
        value = value - textbook.DIVERGENCES[second](leaf.log_softmax(-1), TEACHER, SETTINGS).sum()
    return torch.autograd.grad(value, leaf)[0]


def bias(found: Tensor, divergence: str) -> float:
    target = gradient_of(divergence)
    return float((found - target).norm() / target.norm())


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_holds(claim: Claim, found: Tensor) -> None:
    if claim.divergence and claim.exact:
        assert bias(found, claim.divergence) < EXACT
    elif claim.divergence:
        assert bias(found, claim.divergence) > BIASED, "a bias is claimed"
    elif claim.exact:
        assert float(found.norm()) < EXACT, "no gradient is claimed"
    else:
        assert float(found.norm()) > BIASED
        assert min(bias(found, name) for name in textbook.DIVERGENCES) > BIASED, "no divergence is claimed"


@pytest.mark.parametrize("name", KNOWN)
def test_the_claim_of_the_differentiated_formula_holds(name: str) -> None:
    """An exact claim gives the gradient, and a claim of a bias is not modesty."""
    assert_holds(OBJECTIVES[name].claim("supervised"), mean_gradient(OBJECTIVES[name], "supervised"))


@pytest.mark.parametrize("name", TOKENS)
def test_the_claim_of_the_formula_as_an_advantage_holds(name: str) -> None:
    assert_holds(OBJECTIVES[name].claim("policy_gradient"), mean_gradient(OBJECTIVES[name], "policy_gradient"))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_claimed_is_a_known_divergence_or_none(form: Form) -> None:
    for name in KNOWN:
        claim = OBJECTIVES[name].claim(form)
        assert claim.divergence == "" or set(claim.divergence.split("-")) <= set(textbook.DIVERGENCES), name
        assert claim.note, name


@pytest.fixture
def mine() -> Iterator[str]:
    """A name for a user's objective, which is removed afterwards."""
    yield "mine"
    OBJECTIVES.pop("mine", None)


@pytest.mark.parametrize("claim", ["", "reverse_kl"])
def test_a_registered_formula_claims_to_descend_a_divergence_exactly_but_only_when_differentiated(
    mine: str, claim: str
) -> None:
    register_objective(mine, sees="token", claim=claim)(lambda q, p, s: (q - p) ** 2 / 2)
    differentiated = OBJECTIVES[mine].claim("supervised")
    assert (differentiated.divergence, differentiated.exact) == (claim or mine, True)
    as_advantage = OBJECTIVES[mine].claim("policy_gradient")
    assert (as_advantage.divergence, as_advantage.exact) == ("", False), "exact would claim a gradient of zero"


# ── formulas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", textbook.DIVERGENCES)
def test_a_divergence_is_that_of_the_textbook(name: str) -> None:
    q = STUDENT.log_softmax(-1)
    expected = textbook.DIVERGENCES[name](q, TEACHER, SETTINGS).sum(-1)
    torch.testing.assert_close(objectives.DIVERGENCES[name](q, TEACHER, SETTINGS), expected)


@pytest.mark.parametrize("name", ["jsd", "skewed_kl"])
def test_parameters_of_formulas_default_to_those_of_the_schema(name: str) -> None:
    q, chosen = STUDENT.log_softmax(-1), Distill()
    expected = textbook.DIVERGENCES[name](q, TEACHER, Settings(chosen.beta, chosen.alpha)).sum(-1)
    torch.testing.assert_close(objectives.DIVERGENCES[name](q, TEACHER, Settings()), expected)
    assert Settings().floor == chosen.log_prob_floor
