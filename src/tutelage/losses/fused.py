"""Full-vocabulary divergences with analytic gradients instead of gradients recorded by autograd.

The values equal those of the plain formulas. Autograd would keep about ten tensors of [actions, vocabulary] alive and
subtract nearly equal numbers in the backward pass. Here the gradient with respect to the logits is computed in existing
buffers, so that only three are alive at once, and it is exactly zero where student and teacher agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.policy.text import ABSENT

ROUNDING = 1000.0
"""Log-probs that differ by at most this many machine epsilons (1.2e-4 in float32) count as equal. Two ways to compute
the same model differ by as much, and AdamW would turn such a difference into a full step."""

Rule = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(student log-probs, teacher log-probs, floor) → (value [actions], gradient with respect to the logits). A rule may
overwrite the teacher's log-probs, but not the student's."""


@dataclass(frozen=True, slots=True)
class FusedDivergence:
    """A divergence per action and statistics, all [actions]. Only `value` has a gradient."""

    value: Tensor
    """with gradient"""
    logp: Tensor
    entropy: Tensor
    teacher_logp: Tensor
    settled: Tensor
    """bool: student and teacher agree up to rounding, so there is no gradient"""
    floored: Tensor
    """the number of ids whose teacher log-prob is below the floor"""


def token_terms(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-prob of the ids and the entropy of the distribution, [actions] each, with gradients."""
    logp, entropy = _TokenTerms.apply(logits, ids)  # type: ignore[no-untyped-call]
    return logp, entropy


def judge(
    logits: Tensor, ids: Tensor, teacher: Tensor, rule: Rule, floor: float, allowed: Tensor | None = None
) -> FusedDivergence:
    """Compute a full-vocabulary divergence. `logits` are after temperature; `teacher` log-probs may be overwritten.

    `allowed`, bool [actions, vocabulary], are the ids that exist on both sides, if that is not all of them; logits and
    teacher are restricted to them.
    """
    outputs = _Divergence.apply(logits, ids, teacher, rule, floor, allowed)  # type: ignore[no-untyped-call]
    return FusedDivergence(*outputs)


def agree(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return bool, elementwise: whether two log-probs are equal up to rounding."""
    return (student_logp - teacher_logp).abs() <= ROUNDING * torch.finfo(student_logp.dtype).eps


def reverse_kl(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Compute KL(q‖p); its gradient is q (log q − log p − KL)."""
    difference = torch.sub(student, teacher.clamp_min_(floor), out=teacher)
    q = student.exp()
    value = torch.linalg.vecdot(q, difference)
    return value, difference.sub_(value[:, None]).mul_(q)


def forward_kl(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Compute KL(p‖q); its gradient is q − p."""
    p = teacher.exp()
    value = torch.linalg.vecdot(p, teacher.clamp_min_(_lowest(p)).sub_(student))
    return value, torch.exp(student, out=teacher).sub_(p)


def jsd(beta: float) -> Rule:
    """Return the rule of β KL(p‖m) + (1 − β) KL(q‖m), m = βp + (1 − β)q.

    Its gradient is q (u − Σ q u) with u = (1 − β)(log q − log m).
    """

    def rule(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        p, q = teacher.exp(), student.exp()
        mixture = (p * beta).add_(q, alpha=1 - beta).clamp_min_(torch.finfo(p.dtype).tiny).log_()
        toward_teacher = torch.linalg.vecdot(p, teacher.clamp_min_(_lowest(p)).sub_(mixture))
        pull = torch.sub(student, mixture, out=mixture)
        toward_student = torch.linalg.vecdot(q, pull)
        gradient = pull.sub_(toward_student[:, None]).mul_(q).mul_(1 - beta)
        return beta * toward_teacher + (1 - beta) * toward_student, gradient

    return rule


def skewed_kl(alpha: float) -> Rule:
    """Return the rule of KL(p‖m), m = αp + (1 − α)q. Its gradient is q (u − Σ q u) with u = −(1 − α) p/m."""

    def rule(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        p, q = teacher.exp(), student.exp()
        mixture = (p * alpha).add_(q, alpha=1 - alpha).clamp_min_(torch.finfo(p.dtype).tiny)
        share = (p / mixture).mul_(alpha - 1)
        value = torch.linalg.vecdot(p, teacher.clamp_min_(_lowest(p)).sub_(mixture.log_()))
        return value, share.sub_(torch.linalg.vecdot(q, share)[:, None]).mul_(q)

    return rule


def _lowest(like: Tensor) -> float:
    """Return a finite log-prob whose probability is practically 0, so that 0 · log 0 is 0."""
    return -100.0 if like.dtype == torch.float32 else -700.0


class _TokenTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -torch.linalg.vecdot(logp.exp(), logp)
        ctx.save_for_backward(logp, ids, entropy)
        ctx.set_materialize_grads(False)
        return logp.gather(-1, ids[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        logp, ids, entropy = ctx.saved_tensors
        to_logp, to_entropy = gradients
        if to_logp is None and to_entropy is None:
            return None, None
        gradient = logp.exp()
        if to_entropy is not None:
            weight = (logp + entropy[:, None]).mul_(-to_entropy[:, None])
            gradient.mul_(weight if to_logp is None else weight.sub_(to_logp[:, None]))
        elif to_logp is not None:
            gradient.mul_(-to_logp[:, None])
        if to_logp is not None:
            gradient.scatter_add_(-1, ids[:, None], to_logp[:, None])
        return gradient, None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, teacher: Tensor, rule: Rule, floor: float, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        student = torch.log_softmax(logits, dim=-1)
        if allowed is not None:
            student.masked_fill_(~allowed, ABSENT)
        entropy = -torch.linalg.vecdot(student.exp(), student)
        logp, teacher_logp = (x.gather(-1, ids[:, None]).squeeze(-1) for x in (student, teacher))
        settled = _settled(student, teacher, agree(logp, teacher_logp))
        floored = torch.zeros_like(ids)
        low = (teacher.amin(-1) < floor).nonzero().squeeze(-1)
        below = teacher[low] < floor
        floored[low] = (below if allowed is None else below & allowed[low]).sum(-1)
        value, gradient = rule(student, teacher, floor)
        if bool(settled.any()):
            value, gradient = value.masked_fill(settled, 0.0), gradient.masked_fill_(settled[:, None], 0.0)
        ctx.gradient = gradient  # scaled in place by backward, so a second backward is an error
        ctx.mark_non_differentiable(logp, entropy, teacher_logp, settled, floored)
        return value, logp, entropy, teacher_logp, settled, floored

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(gradients[0][:, None]), None, None, None, None, None


def _settled(student: Tensor, teacher: Tensor, candidates: Tensor) -> Tensor:
    """Return the rows that agree on every id. Only `candidates`, which agree on the sampled id, are compared."""
    settled = candidates.clone()
    rows = candidates.nonzero().squeeze(-1)
    if len(rows):
        settled[rows] = agree(student[rows], teacher[rows]).all(-1)
    return settled
