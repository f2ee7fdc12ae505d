"""What there is to certify: one subject for each objective × payload × form that a recipe can name.

Nothing is listed by hand that a registry knows: objectives come from `OBJECTIVES`, payloads, forms and discounts from
the schema, and a combination is left out only if the schema or the wiring refuses it.
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
"""Not the defaults: a setting that does not arrive is noticed."""
LONGEST = 7
"""tokens of an answer that the recipe allows: the divisor of sequence_sum"""
Build = Callable[[Sequence[TeacherHead]], Algorithm]
Target = Literal["token", "sequence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One row of the table, before it is judged."""

    objective: str
    payload: str
    form: str
    discount: int | None = None
    target: Target
    exact: bool
    """whether the mean gradient is claimed to be the target's; if not, it is claimed to be another"""
    note: str
    build: Build
    """the algorithm, as a recipe gets it"""
    plain: Scalar
    """the loss of some rows, as a textbook has it"""
    aim: Scalar | None
    """what is descended; None is no divergence at all (exact: nothing)"""
    other: Scalar | None = None
    """the same at the other target: states held fixed, or whole sequences"""
    full: Scalar | None = None
    """where the payload names some tokens only: the divergence over all of them"""
    samples: int = 1
    """rows of a batch: the size of a group"""
    critic: bool = False
    """what learns is the critic"""
    agrees: Literal["teacher", "reference", "rewards"] | None = None
    """what makes loss and gradient vanish: a teacher or reference that is the student, or equal rewards"""
    smooth: bool = True
    """the gradient is that of the value; not so where an estimate borrows the gradient of another"""
    updated: bool = False
    """the student has moved since the batch was drawn: this is not the first update of its batch"""
    sampled_apart: bool = False
    """the sampler computes something else than the student, as one of another precision does"""
    schedule: Schedule = field(default_factory=Schedule)
    """how often, and in which parts, a recipe of these words learns from a batch"""
    each: PerAction | None = None
    """what `plain` is the mean of, where updates are made from parts of a batch"""
    claimed: bool = True
    """something is claimed; a user's formula as an advantage is only measured"""

    @property
    def id(self) -> str:
        parts = [self.objective, self.payload, self.form]
        return "/".join(parts if self.discount is None else [*parts, f"discount {self.discount}"])


class Refused(Exception):
    """No recipe can name this combination."""


def subjects(names: Collection[str] | None = None) -> tuple[list[Subject], dict[str, str]]:
    """All subjects, or those of some objectives; and the names that have none, with the reason."""
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
    return found, missing


def builder(**algorithm: Any) -> Build:
    """From the words of a recipe, through the schema and the wiring that every run goes through."""
    config = _config(algorithm)
    return lambda heads: build_algorithm(config, heads)


def scheduled(**algorithm: Any) -> Schedule:
    """The updates of one step, from the same words."""
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
    """The words that a key of the schema may have."""
    return get_args(section.model_fields[key].annotation)


# ── distillation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_objective(objective: Objective) -> tuple[list[Subject], list[str]]:
    found: list[Subject] = []
    refusals: list[str] = []
    for claim in (objective.supervised, objective.policy_gradient):
        unknown = [name for name in _parts(objective, claim) if name and not _has_formula(objective, name)]
        if unknown:
            return [], [f"it claims {' and '.join(unknown)}, which there is no exact formula for"]
    for payload, form, discount in _combinations():
        try:
            found.append(_subject(objective, payload, form, discount))
        except Refused as refusal:
            refusals.append(str(refusal))
    return found, refusals


def _parts(objective: Objective, claim: Claim) -> tuple[str, str]:
    """`a` or `a-b`, or the objective itself, whatever its name looks like."""
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
    """`a` or `a-b`. What is taken off comes from the estimate being held fixed while its advantage is followed. That is
    a matter of each state by itself, so b is at visited states, held fixed, also where the target is the sequence."""
    first, second = _parts(objective, claim)
    sequences = discount == 1 and first in textbook.DIVERGENCES
    aim = textbook.of_sequences(first, SETTINGS) if sequences else _at_states(first)
    held = _at_states(second)
    return aim if aim is None or held is None else textbook.combined((1.0, aim), (-1.0, held))


def _at_states(name: str, payload: str = "full") -> Scalar | None:
    return textbook.at_states(textbook.divergence(name, SETTINGS, payload)) if name else None
