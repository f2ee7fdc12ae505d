"""Divergences between student q and teacher p, per action. Pure tensor functions; q carries the gradient.

Full distributions come as log-probs [actions, vocabulary] over the same ids. −inf in the teacher (a token it excludes)
is allowed where the student's probability is 0 too; `floor` keeps it finite elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = -30.0
"""Teacher log-probs are not taken below this, so that one excluded token does not make a divergence infinite."""


def reverse_kl(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """KL(q‖p) = Σ q (log q − log p), [actions]."""
    return (student_logp.exp() * (student_logp - teacher_logp.clamp_min(FLOOR))).sum(-1)


def forward_kl(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q), [actions]."""
    p = teacher_logp.exp()
    return torch.xlogy(p, p).sum(-1) - (p * student_logp).sum(-1)


def jsd(student_logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """β KL(p‖m) + (1 − β) KL(q‖m) with m = βp + (1 − β)q, [actions]."""
    p, q = teacher_logp.exp(), student_logp.exp()
    mixture = torch.log(beta * p + (1 - beta) * q)
    # Where both are 0 the mixture's log is −inf and is multiplied by 0: take any finite value instead.
    mixture = mixture.clamp_min(-1e4)
    toward_teacher = (torch.xlogy(p, p) - p * mixture).sum(-1)
    toward_student = (q * (student_logp - mixture)).sum(-1)
    return beta * toward_teacher + (1 - beta) * toward_student


def forward_kl_top_k(student_logp_k: Tensor, teacher_logp_k: Tensor, smallest: float = 1e-6) -> Tensor:
    """KL(p‖q) over k named tokens and one bucket for all others, [actions].

    Both arguments are log-probs [actions, k] of the same ids. The bucket makes it a divergence: never negative, zero
    only if both agree on every named token; a lower bound of the full KL. `smallest` is the least mass of a bucket.
    """
    p, q = teacher_logp_k.exp(), student_logp_k.exp()
    rest_p = (1 - p.sum(-1)).clamp_min(0)
    rest_q = (1 - q.sum(-1)).clamp_min(smallest)
    named = (torch.xlogy(p, p) - p * student_logp_k).sum(-1)
    return named + torch.xlogy(rest_p, rest_p) - rest_p * rest_q.log()


def k1(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """log q − log p of the sampled token: an unbiased estimate of KL(q‖p); differentiated, its mean gradient is 0."""
    return student_logp - teacher_logp


def k2(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """½ (log q − log p)²: biased as an estimate, but its mean gradient is that of KL(q‖p)."""
    return 0.5 * (student_logp - teacher_logp).square()


def k3(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """r − 1 − log r with r = p/q: unbiased and never negative; differentiated, it follows KL(p‖q) instead."""
    log_ratio = teacher_logp - student_logp
    return torch.expm1(log_ratio) - log_ratio
