"""Divergences between student q and teacher p, per action. Pure tensor functions; q carries the gradient.

Distributions are log-probs [actions, outcomes] over the same outcomes: all ids of the vocabulary, or some ids and one
bucket for the rest (`buckets`). The student's log-probs are finite, as for any softmax of finite logits. The teacher's
may be −inf for tokens that it excludes; values and gradients stay finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.policy.text import ABSENT as ABSENT

FLOOR = -1000.0
"""Default lower bound of teacher log-probs, so that one excluded token (log-prob −inf) does not make a divergence
infinite. The log-softmax of finite logits does not reach it and is used unchanged."""
RATIO_LIMIT = 30.0
"""Above this log-ratio, k3 continues linearly instead of exponentially."""
NOTHING = -60.0
"""The student's log-prob of the rest bucket when every id is named and nothing is left."""


def reverse_kl(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """Compute KL(q‖p) = Σ q (log q − log p), [actions]."""
    return (student_logp.exp() * (student_logp - teacher_logp.clamp_min(floor))).sum(-1)


def forward_kl(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Compute KL(p‖q) = Σ p (log p − log q), [actions]."""
    p = teacher_logp.exp()
    return torch.xlogy(p, p).sum(-1) - (p * student_logp).sum(-1)


def jsd(student_logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """Compute β KL(p‖m) + (1 − β) KL(q‖m) with m = βp + (1 − β)q, [actions]."""
    p, q = teacher_logp.exp(), student_logp.exp()
    mixture = _log_mixture(p, q, beta)
    toward_teacher = (torch.xlogy(p, p) - p * mixture).sum(-1)
    toward_student = (q * (student_logp - mixture)).sum(-1)
    return beta * toward_teacher + (1 - beta) * toward_student


def skewed_kl(student_logp: Tensor, teacher_logp: Tensor, alpha: float) -> Tensor:
    """Compute KL(p‖m) with m = αp + (1 − α)q, [actions]: at most −log α, however small the student's probability."""
    p, q = teacher_logp.exp(), student_logp.exp()
    return (torch.xlogy(p, p) - p * _log_mixture(p, q, alpha)).sum(-1)


def _log_mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """Compute log(share · p + (1 − share) · q).

    Where both are 0 the result is multiplied by 0 later, so any finite value with a finite gradient will do.
    """
    return (share * p + (1 - share) * q).clamp_min(torch.finfo(p.dtype).tiny).log()


# ── some ids and a bucket for the rest ───────────────────────────────────────────────────────────────────────────────


def buckets(log_probs: Tensor, ids: Tensor, repeated: Tensor | None = None) -> Tensor:
    """Return [actions, k + 1]: the log-probs of k named ids, and of all other ids together.

    log_probs [actions, vocabulary], ids [actions, k]; `repeated` bool [actions, k] marks ids that appear earlier in
    the same row. With the bucket, a divergence over these outcomes is a true divergence: never negative, zero only if
    both sides agree on every named token, and a lower bound of the full one. The bucket is summed in log space,
    because 1 − Σq loses its gradient where the student leaves nothing for the rest.
    """
    named = log_probs.gather(-1, ids)
    if repeated is not None:
        named = named.masked_fill(repeated, ABSENT)
    if ids.shape[-1] >= log_probs.shape[-1] and repeated is None:
        return torch.cat([named, torch.full_like(named[:, :1], ABSENT)], dim=-1)
    rest = log_probs.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    rest = rest.masked_fill(rest == float("-inf"), NOTHING)  # every id is named: keep it finite
    return torch.cat([named, rest], dim=-1)


def teacher_buckets(named: Tensor, repeated: Tensor | None, vocabulary: int) -> Tensor:
    """Return [actions, k + 1] from the log-probs of k ids alone: the rest is 1 minus their sum."""
    if repeated is not None:
        named = named.masked_fill(repeated, ABSENT)
    if named.shape[-1] >= vocabulary and repeated is None:
        return torch.cat([named, torch.full_like(named[:, :1], ABSENT)], dim=-1)
    left = 1 - named.exp().sum(-1, keepdim=True)
    return torch.cat([named, left.clamp_min(torch.finfo(named.dtype).eps).log()], dim=-1)


def repeats(first: Tensor, second: Tensor) -> Tensor:
    """Return bool [actions, k₁ + k₂]: True for ids of `second` that are also in `first`, which has no duplicates."""
    return torch.cat([torch.zeros_like(first, dtype=torch.bool), contained(second, first)], dim=-1)


def contained(ids: Tensor, among: Tensor) -> Tensor:
    """Return bool [actions, k₁]: whether each id is in the same row of `among` [actions, k₂].

    Memory grows with k₁ + k₂, not with k₁ · k₂.
    """
    ordered = among.to(ids.dtype).sort(dim=-1).values
    found = torch.searchsorted(ordered, ids.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return ordered.gather(-1, found) == ids


def forward_kl_topk(student_logp_k: Tensor, teacher_logp_k: Tensor) -> Tensor:
    """Compute Σ p (log p − log q) over the teacher's top k, as in verl, [actions].

    Log-probs are clamped to at least −10 and the sum to [0, 10]. Without a bucket for the rest this is not a
    divergence: where the student gives the named tokens more mass than the teacher, the sum is negative, the clamp
    makes it 0, and no gradient corrects the mass.
    """
    student, teacher = student_logp_k.clamp_min(-10.0), teacher_logp_k.clamp_min(-10.0)
    return (teacher.exp() * (teacher - student)).sum(-1).clamp_min(0.0).clamp_max(10.0)


# ── estimators from the sampled token ─────────────────────────────────────────────────────────────────────────────────


def k1(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """Compute log q − log p: an unbiased estimate of KL(q‖p). As a loss, its mean gradient is 0."""
    return student_logp - teacher_logp.clamp_min(floor)


def k2(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """Compute ½ (log q − log p)²: a biased estimate of KL(q‖p). As a loss, its mean gradient is that of KL(q‖p)."""
    return 0.5 * (student_logp - teacher_logp.clamp_min(floor)).square()


def k3(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """Compute r − 1 − log r with r = p/q: an unbiased, non-negative estimate of KL(q‖p).

    As a loss, its mean gradient is that of KL(p‖q).
    """
    log_ratio = teacher_logp.clamp_min(floor) - student_logp
    bounded = log_ratio.clamp_max(RATIO_LIMIT)
    # Above e^30 the ratio continues as its tangent: exp would overflow, and a plain clamp would have no gradient.
    return torch.expm1(bounded) + bounded.exp() * (log_ratio - bounded) - log_ratio


def absolute(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """Compute |log q − log p|. As a loss, its mean gradient is that of Σ|q − p|, twice the total variation distance."""
    return (student_logp - teacher_logp.clamp_min(floor)).abs()


def low_var_kl(student_logp: Tensor, teacher_logp: Tensor, floor: float = FLOOR) -> Tensor:
    """Compute k3 as in verl: the log-ratio clamped to ±20, the result to ±10. No gradient above p/q ≈ 13.6."""
    log_ratio = (teacher_logp.clamp_min(floor) - student_logp).clamp(-20.0, 20.0)
    return (log_ratio.exp() - 1 - log_ratio).clamp(-10.0, 10.0)
