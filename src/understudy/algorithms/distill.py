"""On-policy distillation: the divergence between student and teacher at every state that the student visited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.algorithms.contract import Algorithm, Payload, TeacherHead
from understudy.losses import distillation, policy_gradient
from understudy.losses.contract import LossSum, ModelOut

BASE = ("tokens", "mask", "behaviour_logp")
SAMPLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": distillation.k1,
    "k2": distillation.k2,
    "k3": distillation.k3,
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """D(student, teacher) per action, from whichever payload the teacher sent."""

    objective: str
    payload: Payload
    beta: float
    heads: Sequence[TeacherHead]

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """[actions] with gradient, and detached columns for the record."""
        if self.payload == "sampled":
            teacher_logp = columns["teacher_logp"]
            return SAMPLED[self.objective](out.logp, teacher_logp), {"teacher_logp": teacher_logp}
        if self.payload == "top_k":
            ids, teacher_k = columns["teacher_topk_ids"], columns["teacher_topk_logp"]
            student_mass = out.log_probs.detach().gather(-1, ids).exp().sum(-1)
            mass = {"teacher_mass": teacher_k.exp().sum(-1), "student_mass": student_mass}
            return distillation.forward_kl_top_k(out.log_probs, ids, teacher_k), {
                "teacher_logp": columns["teacher_logp"],
                **mass,
            }
        teacher = expand(self.heads, columns["teacher_hidden"], columns["teacher_index"])
        sampled = teacher.gather(-1, out.ids[:, None]).squeeze(-1)
        return self._full(out.log_probs, teacher), {"teacher_logp": sampled}

    def _full(self, student: Tensor, teacher: Tensor) -> Tensor:
        if self.objective == "reverse_kl":
            return distillation.reverse_kl(student, teacher)
        if self.objective == "forward_kl":
            return distillation.forward_kl(student, teacher)
        return distillation.jsd(student, teacher, self.beta)


def expand(heads: Sequence[TeacherHead], hidden: Tensor, index: Tensor) -> Tensor:
    """Log-probs [actions, vocabulary] of each action's own teacher; `index` [actions] numbers the heads."""
    with torch.no_grad():
        present = index.unique().tolist()
        if len(present) == 1:
            return heads[int(present[0])].log_probs(hidden)
        parts = [(index == i, heads[int(i)].log_probs(hidden[index == i])) for i in present]
        out = torch.empty(len(hidden), parts[0][1].shape[-1]) if parts else torch.empty(0, 0)
        for rows, logp in parts:
            out[rows] = logp
        return out


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """Differentiate the divergence."""

    divergence: Divergence
    name: str = "distill"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        value, seen = self.divergence(out, columns)
        detached = value.detach()
        return LossSum(value.sum(), {"loss": detached, "divergence": detached, **_common(out, columns), **seen})


@dataclass(frozen=True, slots=True)
class PolicyGradientLoss:
    """The negative divergence, held fixed, is the advantage of the token that was taken."""

    divergence: Divergence
    clip: float
    dual_clip: float
    name: str = "distill"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        logp = out.logp  # first, with gradient: what `out` computes it computes once
        with torch.no_grad():
            value, seen = self.divergence(out, columns)
        clipped = policy_gradient.dual_clip(logp, columns["behaviour_logp"], -value, self.clip, self.dual_clip)
        fractions = {"clipped": clipped.clipped.float(), "dual_clipped": clipped.dual_clipped.float()}
        per_action = {"loss": clipped.loss.detach(), "divergence": value, **fractions, **_common(out, columns), **seen}
        return LossSum(clipped.loss.sum(), per_action)


def _common(out: ModelOut, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        logp, all_logp = out.logp.detach(), out.log_probs.detach()
        entropy = -(all_logp.exp() * all_logp).sum(-1)
        gap = (logp - columns["behaviour_logp"]).abs()
    return {"student_logp": logp, "entropy": entropy, "sampler_gap": gap}


def choose_payload(objective: str, payload: str) -> Payload:
    """The payload that serves an objective when the user named none."""
    if objective in SAMPLED:
        return "sampled"
    return "top_k" if payload == "top_k" else "full"


def distill(
    *,
    objective: str,
    payload: str,
    form: str,
    top_k: int,
    beta: float,
    clip: float,
    dual_clip: float,
    heads: Sequence[TeacherHead],
) -> Algorithm:
    """Put the parts together and say in one line what is optimised."""
    chosen = choose_payload(objective, payload)
    divergence = Divergence(objective, chosen, beta, heads)
    columns: dict[Payload, tuple[str, ...]] = {
        "sampled": ("teacher_logp",),
        "top_k": ("teacher_topk_ids", "teacher_topk_logp", "teacher_logp"),
        "full": ("teacher_hidden", "teacher_index"),
        "none": (),
    }
    loss = SupervisedLoss(divergence) if form == "supervised" else PolicyGradientLoss(divergence, clip, dual_clip)
    return Algorithm(
        name="distill",
        needs=(*BASE, *columns[chosen]),
        payload=chosen,
        losses=(loss,),
        note=f"{objective} ({form}), payload {chosen}: {_exactness(objective, chosen, form)}",
        top_k=top_k if chosen == "top_k" else 0,
    )


def _exactness(objective: str, payload: Payload, form: str) -> str:
    if form == "policy_gradient":
        if payload != "sampled":
            return "the divergence of a state is the same for every token taken there: the mean gradient is ZERO"
        return "per-token advantages, the effect of a token on later states is not counted"
    if payload == "full":
        return "exact at every visited state"
    if payload == "top_k":
        return "a lower bound: all tokens outside the teacher's top k count as one"
    return {
        "k1": "one sample per state; the mean gradient is ZERO",
        "k2": "one sample per state; the mean gradient is that of reverse KL",
        "k3": "one sample per state; the mean gradient is that of FORWARD KL",
    }[objective]
