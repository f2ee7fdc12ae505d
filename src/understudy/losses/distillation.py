"""Divergences between student q and teacher p, per action. Pure tensor functions; q carries the gradient.

Full distributions come as log-probs [actions, vocabulary] over the same ids. The student's are finite, as a softmax of
finite logits gives them; the teacher's may be −inf (a token it excludes). Values and gradients are finite then.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = -30.0
"""Teacher log-probs are not taken below this, so that one excluded token does not make a divergence infinite; nor is
the log-ratio of k3 followed exponentially above its negative."""


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
    # Where both are 0, any finite log will do, as it is multiplied by 0; but it must have a finite gradient too.
    mixture = (beta * p + (1 - beta) * q).clamp_min(torch.finfo(p.dtype).tiny).log()
    toward_teacher = (torch.xlogy(p, p) - p * mixture).sum(-1)
    toward_student = (q * (student_logp - mixture)).sum(-1)
    return beta * toward_teacher + (1 - beta) * toward_student


def forward_kl_top_k(student_logp: Tensor, ids: Tensor, teacher_logp_k: Tensor) -> Tensor:
    """KL(p‖q) over k named tokens and one bucket for all others, [actions].

    student_logp [actions, vocabulary], ids [actions, k] without repetition, teacher_logp_k [actions, k]. The bucket
    makes it a divergence: never negative, zero only if both agree on every named token; a lower bound of the full KL.
    The student's bucket is summed in log space: 1 − Σq loses its gradient just where the student leaves nothing.
    """
    p = teacher_logp_k.exp()
    named = (torch.xlogy(p, p) - p * student_logp.gather(-1, ids)).sum(-1)
    if ids.shape[-1] == student_logp.shape[-1]:
        return named
    rest_p = (1 - p.sum(-1)).clamp_min(0)
    rest_q = student_logp.scatter(-1, ids, float("-inf")).logsumexp(-1)
    return named + torch.xlogy(rest_p, rest_p) - rest_p * rest_q


def k1(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """log q − log p of the sampled token: an unbiased estimate of KL(q‖p); differentiated, its mean gradient is 0."""
    return student_logp - teacher_logp.clamp_min(FLOOR)


def k2(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """½ (log q − log p)²: biased as an estimate, but its mean gradient is that of KL(q‖p)."""
    return 0.5 * (student_logp - teacher_logp.clamp_min(FLOOR)).square()


def k3(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """r − 1 − log r with r = p/q: unbiased and never negative; differentiated, it follows KL(p‖q) instead."""
    log_ratio = teacher_logp.clamp_min(FLOOR) - student_logp
    bounded = log_ratio.clamp_max(-FLOOR)
    # Above e^30 the ratio goes on as its tangent: it would overflow, and a plain clamp would have no gradient.
    return torch.expm1(bounded) + bounded.exp() * (log_ratio - bounded) - log_ratio
