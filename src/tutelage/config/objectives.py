"""The tables of objectives and payloads: what each uses, what teachers are asked for, and the resulting columns.

The schema, algorithms, teachers, plan and certify read these tables. `algorithms.objectives` has the formulas and
claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sees = Literal["distribution", "token", "top_k"]
PayloadName = Literal["none", "sampled", "top_k", "student_top_k", "union", "full", "step_mean"]


@dataclass(frozen=True, slots=True)
class KnownObjective:
    """A built-in objective."""

    sees: Sees
    """Which log-probs it uses: `distribution`, those of all tokens; `token`, that of the sampled token; `top_k`, those
    of the teacher's top k tokens only."""
    estimates_kl: bool = False
    """Whether its mean over samples is KL(student‖teacher), which is then recorded as the metric kl."""


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
"""The built-in objectives. Plugins add others to the registry of `algorithms.objectives`."""

REGISTERED: set[str] = set()
"""Names of the objectives that this process has registered besides, from plugins or from the calling program."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What teachers send for each action."""

    columns: tuple[str, ...]
    """The columns that it adds to the batch."""
    means: str
    """A description for `plan`; {k} is the number of tokens."""
    sampled: bool = False
    """Whether teachers return the log-prob of the sampled token."""
    top_k: bool = False
    """Whether teachers return their own k most likely tokens."""
    given: bool = False
    """Whether teachers return the log-probs of the student's k most likely tokens."""
    hidden: bool = False
    """Whether teachers return final hidden states."""
    step_mean: bool = False
    """Whether teachers return the mean of their own denoising step."""
    whose: str = ""
    """Whose k tokens the payload lists; all other tokens form one bucket."""

    @property
    def bucketed(self) -> bool:
        """Whether the payload lists some tokens and puts all others into one bucket."""
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
"""Payloads that fit an objective, by the log-probs it uses. `auto` selects the first."""
