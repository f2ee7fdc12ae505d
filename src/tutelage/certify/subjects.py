"""The subjects to certify: one for each objective, payload and form that a recipe can combine.

Objectives come from `OBJECTIVES`; payloads, forms and discounts come from the schema. A combination is left out only if
the schema or `algorithms.build` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import ValidationError

from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.algorithms.objectives import OBJECTIVES, Claim, Objective, Settings
from tutelage.certify import textbook
from tutelage.certify.textbook import PerAction, Scalar
from tutelage.certify.toy import TEMPERATURE
from tutelage.config import schema
from tutelage.config.objectives import OBJECTIVES as KNOWN
from tutelage.config.objectives import PAYLOADS, PayloadName
from tutelage.errors import UserError
from tutelage.learner.schedule import Schedule, schedule

SETTINGS = Settings(beta=0.3, alpha=0.2)
"""These differ from the defaults, so that a setting that is not passed on is detected."""
LONGEST = 7
"""The maximum answer length of the recipe, which is the divisor of sequence_sum."""
Build = Callable[[Sequence[TeacherHead]], Algorithm]
Target = Literal["token", "sequence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A combination to certify, which becomes one row of the table."""

    objective: str
    payload: str
    form: str
    discount: int | None = None
    target: Target
    exact: bool
    """Whether the mean gradient is claimed to equal that of the target; otherwise it is claimed to differ."""
    note: str
    build: Build
    """Builds the algorithm as for a recipe."""
    plain: Scalar
    """The textbook loss of a batch."""
    aim: Scalar | None
    """The target whose gradient is claimed; None if no divergence is claimed (with `exact`, a zero mean gradient)."""
    other: Scalar | None = None
    """The other version of the target: at fixed states, or of whole sequences."""
    full: Scalar | None = None
    """For a payload with some tokens only: the divergence over all tokens."""
    samples: int = 1
    """The number of rows in a batch, which form a group."""
    constrained: bool = False
    """Whether turns are drawn under constraints."""
    critic: bool = False
    """Whether the critic is trained instead of the student."""
    agrees: Literal["teacher", "reference", "rewards"] | None = None
    """What makes loss and gradient zero: a teacher or reference equal to the student, or equal rewards."""
    smooth: bool = True
    """Whether the gradient is the derivative of the loss value; false for straight-through estimators."""
    updated: bool = False
    """Whether the student has changed since the batch was sampled, as in a second update of the batch."""
    sampled_apart: bool = False
    """Whether the sampler differs from the student, as one of another precision does."""
    schedule: Schedule = field(default_factory=Schedule)
    """The epochs and mini-batches of the recipe."""
    each: PerAction | None = None
    """The losses per action whose mean is `plain`, for updates from parts of a batch."""
    claimed: bool = True
    """Whether the row makes a claim; a user's formula as an advantage is only measured."""

    @property
    def id(self) -> str:
        parts = [self.objective, self.payload, self.form]
        return "/".join(parts if self.discount is None else [*parts, f"discount {self.discount}"])


class Refused(Exception):
    """No recipe can use this combination."""


def subjects(names: Collection[str] | None = None) -> tuple[list[Subject], dict[str, str]]:
    """Return all subjects, or those of some objectives, and the reason for each name that has none."""
    from tutelage.certify.constrained import constrained
    from tutelage.certify.reuse import later_updates, reuse

    found: list[Subject] = []
    missing: dict[str, str] = {}
    for name in names if names is not None else dict.fromkeys((*KNOWN, *OBJECTIVES)):
        if name not in OBJECTIVES:
            missing[name] = "the schema lets recipes name it, but no such objective is registered"
            continue
        own, refusals = _of_objective(OBJECTIVES[name])
        found += [*own, *(later_updates(OBJECTIVES[name]) if own else ())]
        if not own:
            missing[name] = "nothing can be certified of it: " + "; ".join(dict.fromkeys(refusals))
    if names is None:
        from tutelage.certify.reinforcement import reinforcement

        found += [*reinforcement(), *reuse()]
        known = {subject.objective for subject in found} | {"distill"}
        missing |= {name: "an algorithm without rows" for name in schema.ALGORITHMS if name not in known}
    return [*found, *constrained(found)], missing


def builder(**algorithm: Any) -> Build:
    """Return a function that builds the algorithm from settings, with the schema and wiring of a run."""
    config = _config(algorithm)
    return lambda heads: build_algorithm(config, heads)


def scheduled(**algorithm: Any) -> Schedule:
    """Return the schedule of updates of one step for these settings."""
    return schedule(_config(algorithm), 1)


def _config(algorithm: dict[str, Any]) -> schema.Config:
    name = algorithm.get("name", "distill")
    tasked = name != "distill" or algorithm.get("task_weight", 0) > 0
    return schema.Config.model_validate(
        {
            "student": {"path": "student"},
            "teachers": {"teacher": {"path": "teacher"}} if name == "distill" else {},
            "rewards": {"reward": {"function": "exact_match"}} if tasked else {},
            "data": {"train": "prompts.jsonl"},
            "plugins": ["plugin.py"],
            "rollout": {"max_tokens": LONGEST, "temperature": TEMPERATURE, "samples": 2},
            "algorithm": algorithm,
        }
    )


def choices(section: type[schema.Section], key: str) -> tuple[Any, ...]:
    """Return the allowed values of a key of the schema."""
    return get_args(section.model_fields[key].annotation)


# ── distillation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_objective(objective: Objective) -> tuple[list[Subject], list[str]]:
    found: list[Subject] = []
    refusals: list[str] = []
    for claim in (objective.supervised, objective.policy_gradient):
        unknown = [name for name in _parts(objective, claim) if name and not _has_formula(objective, name)]
        if unknown:
            return [], [f"it claims {' and '.join(unknown)}, for which there is no exact formula"]
    for payload, form, discount in _combinations():
        try:
            found.append(_subject(objective, payload, form, discount))
        except Refused as refusal:
            refusals.append(str(refusal))
    return found, refusals


def _parts(objective: Objective, claim: Claim) -> tuple[str, str]:
    """Split the claim `a-b` into its two parts; the second is empty for `a` or for the name of the objective itself."""
    if claim.divergence == objective.name:
        return objective.name, ""
    first, _, second = claim.divergence.partition("-")
    return first, second


def _has_formula(objective: Objective, name: str) -> bool:
    return name in textbook.DIVERGENCES or name == objective.name


def _combinations() -> Iterator[tuple[PayloadName, str, int]]:
    for payload in choices(schema.Distill, "payload"):
        for form in choices(schema.Distill, "form"):
            for discount in choices(schema.Distill, "discount") if form == "policy_gradient" else (0,):
                if payload != "auto":
                    yield payload, form, discount


def _subject(objective: Objective, payload: PayloadName, form: str, discount: int) -> Subject:
    words: dict[str, Any] = {"objective": objective.name, "payload": payload, "form": form, "discount": discount}
    try:
        schema.Distill(**words)
        build = builder(**words, top_k=2, beta=SETTINGS.beta, alpha=SETTINGS.alpha)
        build([])
    except ValidationError as error:
        raise Refused("; ".join(part["msg"] for part in error.errors())) from None
    except UserError as error:
        raise Refused(str(error)) from None
    if form == "supervised":
        return _supervised(objective, payload, build)
    return _policy_gradient(objective, payload, discount, build)


def _supervised(objective: Objective, payload: PayloadName, build: Build) -> Subject:
    claim = objective.supervised
    bucketed = PAYLOADS[payload].bucketed and objective.sees == "distribution"
    known = claim.divergence in textbook.DIVERGENCES
    own = _at_states(claim.divergence, payload if bucketed else "full")
    return Subject(
        objective=objective.name,
        payload=payload,
        form="supervised",
        target="token" if claim.divergence else "none",
        exact=claim.exact,
        note="exact for the k named tokens and one bucket for the rest" if bucketed else claim.note,
        build=build,
        plain=textbook.token_mean(textbook.supervised(objective, SETTINGS, payload)),
        aim=own,
        other=textbook.of_sequences(claim.divergence, SETTINGS) if known else None,
        full=_at_states(claim.divergence) if bucketed else None,
        agrees="teacher",
    )


def _policy_gradient(objective: Objective, payload: str, discount: int, build: Build) -> Subject:
    claim = objective.policy_gradient
    aims = {reach: _claimed(objective, claim, reach) for reach in (0, 1)}
    return Subject(
        objective=objective.name,
        payload=payload,
        form="policy_gradient",
        discount=discount,
        target="none" if not claim.divergence else "sequence" if discount else "token",
        exact=claim.exact,
        note=claim.note,
        build=build,
        plain=textbook.token_mean(textbook.as_reward(objective, SETTINGS, discount)),
        aim=aims[discount],
        other=aims[1 - discount],
        agrees="teacher",
        claimed=bool(claim.divergence) or claim.exact or objective.name in KNOWN,
    )


def _claimed(objective: Objective, claim: Claim, discount: int) -> Scalar | None:
    """Return the target of the claim `a` or `a-b`. The term b results from holding the estimate fixed in the advantage.
    It concerns each state separately, so b is always taken at fixed visited states, even if the target is the
    sequence."""
    first, second = _parts(objective, claim)
    sequences = discount == 1 and first in textbook.DIVERGENCES
    aim = textbook.of_sequences(first, SETTINGS) if sequences else _at_states(first)
    held = _at_states(second)
    return aim if aim is None or held is None else textbook.combined((1.0, aim), (-1.0, held))


def _at_states(name: str, payload: str = "full") -> Scalar | None:
    return textbook.at_states(textbook.divergence(name, SETTINGS, payload)) if name else None
