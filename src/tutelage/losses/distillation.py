"""Divergences between student q and teacher p, per action. Pure tensor functions; q carries the gradient.

Distributions come as log-probs [actions, outcomes] over the same outcomes: the ids of the vocabulary, or some of them
and a bucket for all others (`buckets`). The student's are finite, as a softmax of finite logits gives them; the
teacher's may be −inf (a token it excludes). Values and gradients are finite then.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = -1000.0
"""Teacher log-probs are not taken below this by default, so that one excluded token (log-prob −inf) does not make a
divergence infinite. The log-softmax of a model's finite logits does not get there: those are taken as they are."""
RATIO_LIMIT = 30.0
"""The log-ratio of k3 is not followed exponentially above this."""
NOTHING = -60.0
"""Log-prob of the student's rest where every id is named."""


def reverse_kl(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """KL(q‖p) = Σ q (log q − log p), [actions]."""
    return (student_logp.exp() * (student_logp - teacher_logp.clamp_min(floor))).sum(-1)


def forward_kl(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q), [actions]."""
    p = teacher_logp.exp()
    return torch.xlogy(p, p).sum(-1) - (p * student_logp).sum(-1)


def jsd(student_logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """β KL(p‖m) + (1 − β) KL(q‖m) with m = βp + (1 − β)q, [actions]."""
    p, q = teacher_logp.exp(), student_logp.exp()
    mixture = _log_mixture(p, q, beta)
    toward_teacher = (torch.xlogy(p, p) - p * mixture).sum(-1)
    toward_student = (q * (student_logp - mixture)).sum(-1)
    return beta * toward_teacher + (1 - beta) * toward_student


def skewed_kl(student_logp: Tensor, teacher_logp: Tensor, alpha: float) -> Tensor:
    """KL(p‖m) with m = αp + (1 − α)q, [actions]: never above −log α, however little the student gives a token."""
    p, q = teacher_logp.exp(), student_logp.exp()
    return (torch.xlogy(p, p) - p * _log_mixture(p, q, alpha)).sum(-1)


def _log_mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """log(share · p + (1 − share) · q). Where both are 0, any finite log will do, as it is multiplied by 0; but it must
    have a finite gradient too."""
    return (share * p + (1 - share) * q).clamp_min(torch.finfo(p.dtype).tiny).log()


# ── some ids and a bucket for the rest ───────────────────────────────────────────────────────────────────────────────

ABSENT = -1e4
"""Log-prob of an outcome that neither side has: its probability is 0 and differences are 0 too."""


def buckets(log_probs: Tensor, ids: Tensor, repeated: Tensor | None = None) -> Tensor:
    """[actions, k + 1]: log-probs of k named ids and of all others together.

    log_probs [actions, vocabulary], ids [actions, k]; `repeated` bool [actions, k] marks ids that are named before.
    The bucket makes any divergence over it a divergence: never negative, zero only if both agree on every named token,
    a lower bound of the full one. It is summed in log space: 1 − Σq would lose its gradient just where the student
    leaves nothing for the rest.
    """
    named = log_probs.gather(-1, ids)
    if repeated is not None:
        named = named.masked_fill(repeated, ABSENT)
    if ids.shape[-1] >= log_probs.shape[-1] and repeated is None:
        return torch.cat([named, torch.full_like(named[:, :1], ABSENT)], dim=-1)
    rest = log_probs.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    rest = rest.masked_fill(rest == float("-inf"), NOTHING)  # every id is named: nothing is left, but finitely
    return torch.cat([named, rest], dim=-1)


def teacher_buckets(named: Tensor, repeated: Tensor | None, vocabulary: int) -> Tensor:
    """[actions, k + 1] from the log-probs of k ids alone: the rest is what they leave of 1."""
    if repeated is not None:
        named = named.masked_fill(repeated, ABSENT)
    if named.shape[-1] >= vocabulary and repeated is None:
        return torch.cat([named, torch.full_like(named[:, :1], ABSENT)], dim=-1)
    left = 1 - named.exp().sum(-1, keepdim=True)
    return torch.cat([named, left.clamp_min(torch.finfo(named.dtype).eps).log()], dim=-1)


def repeats(first: Tensor, second: Tensor) -> Tensor:
    """bool [actions, k₁ + k₂]: ids of `second` that `first` has too; `first` itself is free of repetition."""
    return torch.cat([torch.zeros_like(first, dtype=torch.bool), contained(second, first)], dim=-1)


def contained(ids: Tensor, among: Tensor) -> Tensor:
    """bool [actions, k₁]: ids that the same row of `among` [actions, k₂] has too; takes memory for k₁ + k₂."""
    ordered = among.to(ids.dtype).sort(dim=-1).values
    found = torch.searchsorted(ordered, ids.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return ordered.gather(-1, found) == ids


def forward_kl_topk(student_logp_k: Tensor, teacher_logp_k: Tensor) -> Tensor:
    """Σ p (log p − log q) over the teacher's top k, as verl has it, [actions]: both log-probs not below −10, the sum
    not below 0 and not above 10. Without a bucket for the rest it is no divergence: where the student gives the named
    tokens more than the teacher does, the sum is negative, the clamp makes it 0, and nothing pulls that mass back.
    """
    student, teacher = student_logp_k.clamp_min(-10.0), teacher_logp_k.clamp_min(-10.0)
    return (teacher.exp() * (teacher - student)).sum(-1).clamp_min(0.0).clamp_max(10.0)


# ── estimates from the sampled token ─────────────────────────────────────────────────────────────────────────────────


def k1(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """log q − log p of the sampled token: an unbiased estimate of KL(q‖p); differentiated, its mean gradient is 0."""
    return student_logp - teacher_logp.clamp_min(floor)


def k2(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """½ (log q − log p)²: biased as an estimate, but its mean gradient is that of KL(q‖p)."""
    return 0.5 * (student_logp - teacher_logp.clamp_min(floor)).square()


def k3(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """r − 1 − log r with r = p/q: unbiased and never negative; differentiated, it follows KL(p‖q) instead."""
    log_ratio = teacher_logp.clamp_min(floor) - student_logp
    bounded = log_ratio.clamp_max(RATIO_LIMIT)
    # Above e^30 the ratio goes on as its tangent: it would overflow, and a plain clamp would have no gradient.
    return torch.expm1(bounded) + bounded.exp() * (log_ratio - bounded) - log_ratio


def absolute(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """|log q − log p|: differentiated, its mean gradient is that of Σ|q − p|, twice the total variation distance."""
    return (student_logp - teacher_logp.clamp_min(floor)).abs()


def low_var_kl(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """k3 as verl has it: the log-ratio clamped to ±20 and the result to ±10, so above p/q ≈ 13.6 it has no gradient."""
    log_ratio = (teacher_logp.clamp_min(floor) - student_logp).clamp(-20.0, 20.0)
    return (log_ratio.exp() - 1 - log_ratio).clamp(-10.0, 10.0)
