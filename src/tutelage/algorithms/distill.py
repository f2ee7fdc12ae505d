"""On-policy distillation: the divergence between student and teacher at every state that the student visits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutelage.algorithms.advantages import return_to_go, whiten
from tutelage.algorithms.contract import Algorithm, Episodes, Signal, TeacherHead
from tutelage.algorithms.objectives import OBJECTIVES, Form, Objective, Settings
from tutelage.algorithms.policy import (
    ClippedLoss,
    PolicySettings,
    aggregator,
    common,
    later_updates,
    sampler_gap,
    task_signal,
    token_weight,
)
from tutelage.config.objectives import PAYLOADS, SERVES, PayloadName
from tutelage.data.trajectory import Batch
from tutelage.losses import distillation, fused
from tutelage.losses.contract import Loss, LossSum, ModelOut
from tutelage.policy.text import renormalised

BASE = ("tokens", "mask", "behaviour_logp")
Judged = tuple[Tensor, dict[str, Tensor]]
"""The divergence [actions] with gradient, and detached columns for the record."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """D(student, teacher) per action, computed from the teacher's payload."""

    objective: Objective
    payload: PayloadName
    heads: Sequence[TeacherHead]
    settings: Settings = field(default_factory=Settings)

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> Judged:
        if self.payload == "full":
            return self._full(out, columns)
        if self.payload == "sampled":
            return self._sampled(out, columns)
        return self._bucketed(out, columns)

    def _full(self, out: ModelOut, columns: Mapping[str, Tensor]) -> Judged:
        teacher = expand(self.heads, columns["teacher_hidden"], columns["teacher_index"])
        teacher = renormalised(teacher, out.allowed)
        if self.objective.rule is None:
            seen = {"teacher_logp": _taken(teacher, out.ids), **common(out, columns)}
            return self.objective.formula(out.log_probs, teacher, self.settings), seen
        rule = self.objective.rule(self.settings)
        judged = fused.judge(out.tempered, out.ids, teacher, rule, self.settings.floor, out.allowed)
        seen = {
            "student_logp": judged.logp,
            "entropy": judged.entropy,
            "sampler_gap": sampler_gap(judged.logp, columns),
            "teacher_logp": judged.teacher_logp,
            "settled": judged.settled.float(),
            "floored": (judged.floored > 0).float(),
        }
        return judged.value, seen

    def _sampled(self, out: ModelOut, columns: Mapping[str, Tensor]) -> Judged:
        teacher, student = columns["teacher_logp"], out.logp
        settled = fused.agree(student.detach(), teacher)
        value = self.objective.formula(student, teacher, self.settings).masked_fill(settled, 0.0)
        floored = (teacher < self.settings.floor).float()
        return value, {"teacher_logp": teacher, "settled": settled.float(), "floored": floored, **common(out, columns)}

    def _bucketed(self, out: ModelOut, columns: Mapping[str, Tensor]) -> Judged:
        ids, named, repeated = named_by(self.payload, columns)
        log_probs = out.log_probs
        if self.objective.sees == "top_k":
            student, teacher = log_probs.gather(-1, ids), named
        else:
            student = distillation.buckets(log_probs, ids, repeated)
            teacher = distillation.teacher_buckets(named, repeated, log_probs.shape[-1])
        # Compare the named tokens only. If they agree, so does the rest, but the log of a tiny rest is only rounding.
        settled = fused.agree(student[:, : named.shape[-1]].detach(), teacher[:, : named.shape[-1]]).all(-1)
        value = self.objective.formula(student, teacher, self.settings).masked_fill(settled, 0.0)
        present = named if repeated is None else named.masked_fill(repeated, distillation.ABSENT)
        seen = {
            "teacher_logp": columns["teacher_logp"],
            "settled": settled.float(),
            "floored": self._floored(teacher, repeated, log_probs.shape[-1]),
            "teacher_mass": present.exp().sum(-1),
            **_student_mass(log_probs.detach(), ids, repeated, columns),
            **common(out, columns),
        }
        return value, seen

    def _floored(self, teacher: Tensor, repeated: Tensor | None, vocabulary: int) -> Tensor:
        """Return float [actions]: 1 where the floor applies to an outcome.

        Repeated ids do not count, nor does the rest bucket if every id is named.
        """
        low = teacher < self.settings.floor
        if repeated is None:
            return low[:, :vocabulary].any(-1).float()
        low[:, : repeated.shape[-1]] &= ~repeated
        return low.any(-1).float()


def named_by(payload: PayloadName, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids [actions, k] of a bucketed payload, the teacher's log-probs of them, and which are repeated."""
    if payload == "top_k":
        return columns["teacher_topk_ids"], columns["teacher_topk_logp"], None
    if payload == "student_top_k":
        return columns["student_topk_ids"], columns["teacher_given_logp"], None
    first, second = columns["teacher_topk_ids"], columns["student_topk_ids"]
    named = torch.cat([columns["teacher_topk_logp"], columns["teacher_given_logp"]], dim=-1)
    return torch.cat([first, second], dim=-1), named, distillation.repeats(first, second)


def _student_mass(
    log_probs: Tensor, ids: Tensor, repeated: Tensor | None, columns: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the student's mass on the named ids, and the share of the teacher's top k that is in the student's."""
    mass = log_probs.gather(-1, ids).exp()
    if repeated is not None:
        mass = mass.masked_fill(repeated, 0.0)
    seen = {"student_mass": mass.sum(-1)}
    if "teacher_topk_ids" in columns:
        theirs = columns["teacher_topk_ids"]
        own = columns.get("student_topk_ids", log_probs.topk(theirs.shape[-1], dim=-1).indices)
        seen["overlap"] = distillation.contained(theirs, own).float().mean(-1)
    return seen


def _taken(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(-1, ids[:, None]).squeeze(-1)


def expand(heads: Sequence[TeacherHead], hidden: Tensor, index: Tensor) -> Tensor:
    """Return the log-probs [actions, vocabulary] of each action's teacher; `index` [actions] selects its head."""
    with torch.no_grad():
        present = index.unique().tolist()
        if len(present) == 1:
            return heads[int(present[0])](hidden)
        parts = [(index == i, heads[int(i)](hidden[index == i])) for i in present]
        out = parts[0][1].new_empty(len(hidden), parts[0][1].shape[-1]) if parts else hidden.new_empty(0, 0)
        for rows, logp in parts:
            out[rows] = logp
        return out


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """A loss that differentiates the divergence."""

    divergence: Divergence
    policy: PolicySettings = field(default_factory=PolicySettings)
    """settings of the task loss used alongside; estimates from the sampled token get the same importance weights"""
    name: str = "distill"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        value, seen = self.divergence(out, columns)
        weight = token_weight(self.policy, out.logp, columns) if self.divergence.payload == "sampled" else None
        loss = value if weight is None else value * weight
        return LossSum(loss.sum(), {"loss": loss.detach(), "divergence": value.detach(), **seen})


@dataclass(frozen=True, slots=True)
class DivergenceAsReward:
    """Uses the negative divergence of the sampled token, at the sampler's log-probs, as its advantage.

    With discount 0 the advantage is that of the token alone, with discount 1 the sum from it to the end.
    """

    objective: Objective
    settings: Settings
    discount: int
    normalise: bool

    def __call__(self, batch: Batch) -> Signal:
        behaviour, teacher = batch.columns["behaviour_logp"], batch.columns["teacher_logp"]
        settled = fused.agree(behaviour.values, teacher.values)
        value = self.objective.formula(behaviour.values, teacher.values, self.settings).masked_fill(settled, 0.0)
        divergence = behaviour.map(lambda _: value)
        advantage = return_to_go(divergence, float(self.discount)).map(torch.neg)
        if self.normalise:
            advantage = whiten(advantage)
        return Signal(columns={"divergence": divergence, "distill_advantage": advantage})


def choose_payload(objective: Objective, payload: str) -> PayloadName:
    """Return the payload the user named, or the default one of the objective."""
    if payload != "auto":
        return payload  # type: ignore[return-value]  # the schema has checked it
    return SERVES[objective.sees][0]


def distill(
    *,
    objective: str,
    payload: str = "auto",
    form: Form = "supervised",
    top_k: int = 32,
    settings: Settings = Settings(),  # noqa: B008  # frozen
    discount: int = 0,
    normalise: bool = False,
    policy: PolicySettings = PolicySettings(),  # noqa: B008  # frozen
    task_weight: float = 0.0,
    heads: Sequence[TeacherHead] = (),
) -> Algorithm:
    """Build the distillation algorithm, with a note that says what is optimised."""
    chosen_objective = OBJECTIVES[objective]
    chosen = choose_payload(chosen_objective, payload)
    losses: list[Loss] = []
    over_columns: Callable[[Batch], Signal] | None = None
    if form == "supervised":
        loss_policy = policy if task_weight > 0 else PolicySettings()
        losses.append(SupervisedLoss(Divergence(chosen_objective, chosen, heads, settings), loss_policy))
    else:
        losses.append(
            ClippedLoss(policy, advantage="distill_advantage", name="distill", shown=("divergence", "teacher_logp"))
        )
        over_columns = DivergenceAsReward(chosen_objective, settings, discount, normalise)
    over_rows: Callable[[Mapping[str, Tensor], Episodes], Signal] | None = None
    if task_weight > 0:
        losses.append(ClippedLoss(policy, advantage="task_advantage", name="task", coefficient=task_weight))
        over_rows = task_signal(policy)
    return Algorithm(
        name="distill",
        needs=(*BASE, *PAYLOADS[chosen].columns, *(("reward",) if task_weight > 0 else ())),
        payload=chosen,
        losses=tuple(losses),
        note=f"{objective} ({form}), payload {chosen}: {exactness(chosen_objective, chosen, form, discount)}"
        + _raised_floor(settings)
        + (_later_updates(chosen, policy) if form == "supervised" else later_updates(policy))
        + (f"; plus task rewards, weight {task_weight:g}" if task_weight > 0 else "")
        + (later_updates(policy) if form == "supervised" and task_weight > 0 else ""),
        unconstrained=_some_tokens(chosen),
        top_k=top_k if PAYLOADS[chosen].bucketed else 0,
        derives=("old_logp",) if policy.needs_old_logp and (task_weight > 0 or form != "supervised") else (),
        over_rows=over_rows,
        over_columns=over_columns,
        aggregate=aggregator(policy) if form == "policy_gradient" or task_weight > 0 else None,
    )


def _some_tokens(payload: PayloadName) -> str:
    """Return why rows with constraints cannot be learned from with this payload; empty if they can."""
    if not PAYLOADS[payload].bucketed:
        return ""
    return (
        f"payload {payload} has {PAYLOADS[payload].whose} likeliest tokens of the whole vocabulary, not of what the "
        "constraint allows: use payload full"
    )


def _later_updates(payload: PayloadName, policy: PolicySettings) -> str:
    """Return the remark for a sampled divergence that is differentiated more than once per batch."""
    if not policy.several_updates or payload != "sampled":
        return ""
    return "; from a batch's second update on, tokens are weighed by how likely they are now, at the states of before"


def _raised_floor(settings: Settings) -> str:
    """Return the remark for a floor so high that it may apply to tokens which the teacher does not exclude."""
    if settings.floor <= distillation.FLOOR:
        return ""
    return f"; teacher log-probs below {settings.floor:g} count as {settings.floor:g} (algorithm.log_prob_floor)"


def exactness(objective: Objective, payload: PayloadName, form: Form, discount: int) -> str:
    """Say for the run's first line whether the objective is computed exactly."""
    claim = objective.claim(form)
    if form == "policy_gradient":
        reach = "whole sequences" if discount else "per token, its effect on later states is not counted"
        return f"{claim.note} ({reach})"
    if PAYLOADS[payload].bucketed and objective.sees == "distribution":
        return f"a lower bound: all tokens outside {PAYLOADS[payload].whose} top k count as one"
    return claim.note
