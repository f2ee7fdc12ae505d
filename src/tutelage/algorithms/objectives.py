"""The objectives that a recipe can name in `algorithm.objective`: formulas, what they see, and what they claim.

A claim names the divergence over the full distribution that an objective descends, at fixed states (target `token`) or
of whole sequences (target `sequence`). `tutelage certify` compares the claim with the actual gradient of the losses.

    @objective("my_loss", sees="distribution", claim="reverse_kl")
    def my_loss(student_logp, teacher_logp, settings):   # [actions, outcomes] each → [actions]
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tutelage.config.objectives import OBJECTIVES as KNOWN
from tutelage.config.objectives import REGISTERED, Sees
from tutelage.isolation.handover import redefines
from tutelage.losses import distillation, fused

Form = Literal["supervised", "policy_gradient"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of the formulas."""

    beta: float = 0.5
    """weight of the teacher in the mixture of jsd"""
    alpha: float = 0.1
    """weight of the teacher in the mixture of skewed_kl"""
    floor: float = distillation.FLOOR
    """lower bound of teacher log-probs"""


Formula = Callable[[Tensor, Tensor, Settings], Tensor]


@dataclass(frozen=True, slots=True)
class Claim:
    """The divergence that one form of an objective descends."""

    divergence: str
    """name of a full-distribution divergence (`DIVERGENCES`), or a difference of two such as "reverse_kl-forward_kl";
    "" means none, and if `exact`, a mean gradient of zero"""
    exact: bool
    """whether the expected gradient is that of `divergence`; if not, `note` explains the difference"""
    note: str


@dataclass(frozen=True, slots=True)
class Objective:
    """A formula and its claims."""

    name: str
    sees: Sees
    formula: Formula
    supervised: Claim
    policy_gradient: Claim
    """for discount 0; with discount 1 the target is the sequence"""
    rule: Callable[[Settings], fused.Rule] | None = None
    """the fused full-vocabulary form of the formula"""

    def claim(self, form: Form) -> Claim:
        return self.supervised if form == "supervised" else self.policy_gradient


OBJECTIVES: dict[str, Objective] = {}

DIVERGENCES: Mapping[str, Formula] = {
    "reverse_kl": lambda q, p, s: distillation.reverse_kl(q, p, s.floor),
    "forward_kl": lambda q, p, s: distillation.forward_kl(q, p),
    "jsd": lambda q, p, s: distillation.jsd(q, p, s.beta),
    "skewed_kl": lambda q, p, s: distillation.skewed_kl(q, p, s.alpha),
    "total_variation": lambda q, p, s: (q.exp() - p.exp()).abs().sum(-1),
}
"""Full-distribution divergences that claims refer to; total_variation is Σ|q − p|."""

_SAME = Claim("", False, "the divergence of a state is the same for every token taken there: the mean gradient is ZERO")


def register_objective(name: str, *, sees: Sees = "distribution", claim: str = "") -> Callable[[Formula], Formula]:
    """Register a user's formula under a name.

    `claim` is the divergence that the formula descends when it is differentiated; by default, the formula itself.
    """

    def add(formula: Formula) -> Formula:
        known = OBJECTIVES[name].formula if name in OBJECTIVES else formula
        if known is not formula and not redefines(known, formula):
            raise ValueError(f"an objective named {name!r} is registered already")
        if claim and claim not in DIVERGENCES:
            raise ValueError(f"objective {name!r} claims {claim!r}; there are {', '.join(DIVERGENCES)}")
        supervised = Claim(claim or name, True, f"claims {claim or 'itself'}, at every visited state")
        OBJECTIVES[name] = Objective(name, sees, formula, supervised, _SAME if sees != "token" else _unknown())
        REGISTERED.add(name)
        return formula

    return add


def _unknown() -> Claim:
    return Claim("", False, "as an advantage nothing is claimed of it")


def _distribution(name: str, rule: Callable[[Settings], fused.Rule]) -> None:
    claim = Claim(name, True, "exact at every visited state")
    OBJECTIVES[name] = Objective(name, KNOWN[name].sees, DIVERGENCES[name], claim, _SAME, rule)


def _token(
    name: str, formula: Callable[[Tensor, Tensor, float], Tensor], supervised: Claim, policy_gradient: Claim
) -> None:
    sees = KNOWN[name].sees
    OBJECTIVES[name] = Objective(name, sees, lambda q, p, s: formula(q, p, s.floor), supervised, policy_gradient)


_distribution("reverse_kl", lambda settings: fused.reverse_kl)
_distribution("forward_kl", lambda settings: fused.forward_kl)
_distribution("jsd", lambda settings: fused.jsd(settings.beta))
_distribution("skewed_kl", lambda settings: fused.skewed_kl(settings.alpha))

_K2 = Claim("reverse_kl", True, "one sample per state; the mean gradient is that of reverse KL")
_K2_PG = Claim("", False, "as an advantage it descends neither KL: it shrinks tokens that differ, either way")
_K3 = Claim("forward_kl", True, "one sample per state; the mean gradient is that of FORWARD KL")
_K3_PG = Claim(
    "reverse_kl-forward_kl", True, "as an advantage it descends reverse KL MINUS forward KL: weak close to the teacher"
)
_token(
    "k1",
    distillation.k1,
    Claim("", True, "one sample per state; the mean gradient is ZERO"),
    Claim("reverse_kl", True, "one sample per state; the mean gradient is that of reverse KL"),
)
_token("k2", distillation.k2, _K2, _K2_PG)
_token("mse", distillation.k2, _K2, _K2_PG)
_token("k3", distillation.k3, _K3, _K3_PG)
_token(
    "low_var_kl",
    distillation.low_var_kl,
    Claim("forward_kl", False, "k3 with clamps: no gradient where the teacher gives a token 13.6 times the student's"),
    Claim("reverse_kl-forward_kl", False, "as k3, but values above 10 are cut off"),
)
_token(
    "abs",
    distillation.absolute,
    Claim("total_variation", True, "one sample per state; the mean gradient is that of Σ|q − p|"),
    Claim("", False, "|log q − log p| as an advantage descends no divergence"),
)
OBJECTIVES["forward_kl_topk"] = Objective(
    "forward_kl_topk",
    KNOWN["forward_kl_topk"].sees,
    lambda q, p, s: distillation.forward_kl_topk(q, p),
    Claim(
        "forward_kl",
        False,
        "no bucket for the rest, and clamps: biased; forward_kl with payload top_k is the corrected one",
    ),
    _SAME,
)
