"""The tables of objectives and payloads: what each looks at, what teachers are asked for, which columns arrive.

Schema, algorithms, teachers, plan and certify all read these. Formulas and claims: `algorithms.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sees = Literal["distribution", "token", "top_k"]
PayloadName = Literal["none", "sampled", "top_k", "student_top_k", "union", "full", "step_mean"]


@dataclass(frozen=True, slots=True)
class KnownObjective:
    """An objective that comes with the package."""

    sees: Sees
    """distribution: log-probs of all outcomes; token: of the sampled token; top_k: of the teacher's k tokens alone"""
    estimates_kl: bool = False
    """its mean over samples is KL(student‖teacher), and is recorded as metric kl"""


OBJECTIVES: Mapping[str, KnownObjective] = {
    "reverse_kl": KnownObjective("distribution", estimates_kl=True),
    "forward_kl": KnownObjective("distribution"),
    "jsd": KnownObjective("distribution"),
    "skewed_kl": KnownObjective("distribution"),
    "k1": KnownObjective("token", estimates_kl=True),
    "k2": KnownObjective("token"),
    "k3": KnownObjective("token", estimates_kl=True),
    "abs": KnownObjective("token"),
    "mse": KnownObjective("token"),
    "low_var_kl": KnownObjective("token"),
    "forward_kl_topk": KnownObjective("top_k"),
}
"""Objectives that come with the package; plugins add others to the registry of `algorithms.objectives`."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What teachers send of each action."""

    columns: tuple[str, ...]
    """what it brings to the learner"""
    means: str
    """what it is, for `plan`; {k} is the number of tokens"""
    sampled: bool = False
    """teachers are asked for the log-prob of the token that was taken,"""
    top_k: bool = False
    """for their own k likeliest tokens,"""
    given: bool = False
    """for the log-probs of the student's k likeliest tokens,"""
    hidden: bool = False
    """for final hidden states,"""
    step_mean: bool = False
    """or for where they would have gone at a denoising step"""
    whose: str = ""
    """whose k tokens are named, all others counting as one"""

    @property
    def bucketed(self) -> bool:
        """Some tokens are named, the others are one bucket."""
        return self.top_k or self.given


_TEACHERS = ("teacher_topk_ids", "teacher_topk_logp")
_STUDENTS = ("student_topk_ids", "teacher_given_logp")
PAYLOADS: Mapping[PayloadName, Payload] = {
    "none": Payload((), "nothing"),
    "sampled": Payload(("teacher_logp",), "the log-prob of the sampled token", sampled=True),
    "top_k": Payload(
        (*_TEACHERS, "teacher_logp"), "its {k} likeliest tokens", sampled=True, top_k=True, whose="the teacher's"
    ),
    "student_top_k": Payload(
        (*_STUDENTS, "teacher_logp"),
        "the log-probs of the student's {k} likeliest tokens",
        sampled=True,
        given=True,
        whose="the student's",
    ),
    "union": Payload(
        (*_TEACHERS, *_STUDENTS, "teacher_logp"),
        "its {k} likeliest tokens and the log-probs of the student's {k}",
        sampled=True,
        top_k=True,
        given=True,
        whose="either's",
    ),
    "full": Payload(
        ("teacher_hidden", "teacher_index"), "final hidden states, which stand for the full distribution", hidden=True
    ),
    "step_mean": Payload(("teacher_mean",), "where it would have gone at every denoising step", step_mean=True),
}

SERVES: Mapping[Sees, tuple[PayloadName, ...]] = {
    "distribution": ("full", "top_k", "student_top_k", "union"),
    "token": ("sampled",),
    "top_k": ("top_k",),
}
"""Payloads that serve an objective, by what it looks at. The first is the one that `auto` stands for."""
