"""The same quantities as the plain formulas, with their gradients written out instead of recorded by autograd.

A full-vocabulary loss touches tensors of [actions, vocabulary], and autograd would keep about ten of them alive and
subtract nearly equal numbers on the way back. Here the gradient with respect to the logits is formed in the buffers
that are there already, so that three are alive at once, and where student and teacher agree it is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUNDING = 1000.0
"""Log-probs closer than so many machine epsilons (1.2e-4 in float32) count as equal: two ways of computing the same
model differ by that. Their difference carries no information, but AdamW would make a full step out of it."""

Rule = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(student log-probs, teacher log-probs, floor) → (value [actions], gradient with respect to the logits). May overwrite
the teacher's; the student's stay."""


@dataclass(frozen=True, slots=True)
class FusedDivergence:
    """A divergence per action, and what is known beside it (all [actions], without gradient)."""

    value: Tensor
    """with gradient"""
    logp: Tensor
    entropy: Tensor
    teacher_logp: Tensor
    settled: Tensor
    """bool: student and teacher agree to rounding, no gradient"""
    floored: Tensor
    """ids that the teacher's floor applied to"""


def token_terms(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of the ids and entropy of the distribution, [actions] each, with gradients."""
    logp, entropy = _TokenTerms.apply(logits, ids)  # type: ignore[no-untyped-call]
    return logp, entropy


def judge(logits: Tensor, ids: Tensor, teacher: Tensor, rule: Rule, floor: float) -> FusedDivergence:
    """A full-vocabulary divergence. `logits` after temperature; `teacher` log-probs are consumed."""
    outputs = _Divergence.apply(logits, ids, teacher, rule, floor)  # type: ignore[no-untyped-call]
    return FusedDivergence(*outputs)


def agree(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """bool, elementwise: equal to rounding."""
    return (student_logp - teacher_logp).abs() <= ROUNDING * torch.finfo(student_logp.dtype).eps


def reverse_kl(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """KL(q‖p); gradient q (log q − log p − KL)."""
    difference = torch.sub(student, teacher.clamp_min_(floor), out=teacher)
    q = student.exp()
    value = torch.linalg.vecdot(q, difference)
    return value, difference.sub_(value[:, None]).mul_(q)


def forward_kl(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """KL(p‖q); gradient q − p."""
    p = teacher.exp()
    value = torch.linalg.vecdot(p, teacher.clamp_min_(_lowest(p)).sub_(student))
    return value, torch.exp(student, out=teacher).sub_(p)


def jsd(beta: float) -> Rule:
    """β KL(p‖m) + (1 − β) KL(q‖m), m = βp + (1 − β)q; gradient q (u − Σ q u), u = (1 − β)(log q − log m)."""

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
    """KL(p‖m), m = αp + (1 − α)q; gradient q (u − Σ q u), u = −(1 − α) p/m."""

    def rule(student: Tensor, teacher: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        p, q = teacher.exp(), student.exp()
        mixture = (p * alpha).add_(q, alpha=1 - alpha).clamp_min_(torch.finfo(p.dtype).tiny)
        share = (p / mixture).mul_(alpha - 1)
        value = torch.linalg.vecdot(p, teacher.clamp_min_(_lowest(p)).sub_(mixture.log_()))
        return value, share.sub_(torch.linalg.vecdot(q, share)[:, None]).mul_(q)

    return rule


def _lowest(like: Tensor) -> float:
    """A log-prob whose probability is as good as 0 but which is finite: 0 · log 0 is 0."""
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
        ctx: Any, logits: Tensor, ids: Tensor, teacher: Tensor, rule: Rule, floor: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        student = torch.log_softmax(logits, dim=-1)
        entropy = -torch.linalg.vecdot(student.exp(), student)
        logp, teacher_logp = (x.gather(-1, ids[:, None]).squeeze(-1) for x in (student, teacher))
        settled = _settled(student, teacher, agree(logp, teacher_logp))
        floored = torch.zeros_like(ids)
        low = (teacher.amin(-1) < floor).nonzero().squeeze(-1)
        floored[low] = (teacher[low] < floor).sum(-1)
        value, gradient = rule(student, teacher, floor)
        if bool(settled.any()):
            value, gradient = value.masked_fill(settled, 0.0), gradient.masked_fill_(settled[:, None], 0.0)
        ctx.gradient = gradient  # ours alone: backward may scale it where it lies, and a second backward is an error
        ctx.mark_non_differentiable(logp, entropy, teacher_logp, settled, floored)
        return value, logp, entropy, teacher_logp, settled, floored

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(gradients[0][:, None]), None, None, None, None


def _settled(student: Tensor, teacher: Tensor, candidates: Tensor) -> Tensor:
    """Rows that agree on every id; only those that agree on the sampled one need a closer look."""
    settled = candidates.clone()
    rows = candidates.nonzero().squeeze(-1)
    if len(rows):
        settled[rows] = agree(student[rows], teacher[rows]).all(-1)
    return settled
