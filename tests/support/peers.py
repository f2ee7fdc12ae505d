"""The formulas of TRL 1.16.0 and verl 0.9.1, written out from their sources, to compare ours with.

Losses and log-probs are padded [rows, longest] with a mask, as those trainers have them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trl_jsd(student_logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
    """`generalized_jsd_loss` before its reduction, [actions]: β 0 is KL(p‖q), β 1 is KL(q‖p). Both are tempered."""
    student = (student_logits / temperature).log_softmax(-1)
    teacher = (teacher_logits / temperature).log_softmax(-1)
    if beta == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    share = torch.tensor(beta, dtype=student.dtype)
    mixture = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return (share * to_teacher + (1 - share) * to_student).sum(-1)


def trl_advantages(rewards: Tensor, scale: str) -> Tensor:
    """Advantages of `GRPOTrainer`, [groups, samples]: `scale_rewards` is group, batch or none."""
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    return centred / ((rewards.std(1, keepdim=True) if scale == "group" else rewards.std()) + 1e-4)


def trl_clipped(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """The loss per token of `GRPOTrainer` with `epsilon`, `epsilon_high` and `delta`."""
    ratio = (logp - old).exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    ratio = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(ratio * advantage, bounded * advantage)


def trl_kl(logp: Tensor, old: Tensor, reference: Tensor, *, corrected: bool) -> Tensor:
    """The KL term per token of `GRPOTrainer`; `corrected` is `use_bias_correction_kl`."""
    k3 = (reference - logp).exp() - (reference - logp) - 1
    return k3 * (logp - old).exp() if corrected else k3


def trl_reduced(losses: Tensor, mask: Tensor, loss_type: str, parts: int, longest: int) -> Tensor:
    """The loss of `GRPOTrainer` over `parts` micro-batches of equal size; `longest` is `max_completion_length`."""
    total = torch.zeros((), dtype=losses.dtype)
    for loss, here in zip(losses.chunk(parts), mask.chunk(parts), strict=True):
        if loss_type == "grpo":
            total += ((loss * here).sum(-1) / here.sum(-1)).mean() / parts
        elif loss_type == "bnpo":
            total += (loss * here).sum() / here.sum() / parts
        elif loss_type == "dr_grpo":
            total += (loss * here).sum() / (len(loss) * longest) / parts
        elif loss_type == "dapo":
            total += (loss * here).sum() / mask.sum()
    return total


def trl_rloo(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    """The loss of `RLOOTrainer`: one ratio for each answer, which is clipped; `advantage` [rows]."""
    ratio = ((logp - old) * mask).sum(1).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


# ── verl ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def verl_kl(logp: Tensor, other: Tensor, kind: str) -> Tensor:
    """`kl_penalty`; a `+` behind the name means the gradient of k2 with the value of that estimate."""
    if kind.endswith("+"):
        pull = 0.5 * (logp - other).square()
        return pull - pull.detach() + verl_kl(logp, other, kind[:-1]).detach()
    if kind in ("kl", "k1"):
        return logp - other
    if kind == "abs":
        return (logp - other).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (logp - other).square()
    log_ratio = (other - logp).clamp(-20, 20)  # k3 and low_var_kl are the same
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


def verl_topk(student: Tensor, teacher: Tensor, floor: float | None, ceiling: float | None) -> Tensor:
    """`forward_kl_topk` from log-probs [actions, k] of the teacher's tokens: `log_prob_min_clamp`, `loss_max_clamp`."""
    if floor is not None:
        student, teacher = student.clamp_min(floor), teacher.clamp_min(floor)
    value = (teacher.exp() * (teacher - student)).sum(-1).clamp_min(0.0)
    return value if ceiling is None else value.clamp(-ceiling, ceiling)


def verl_clipped(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float, dual: float) -> Tensor:
    """The loss per token of the policy loss `vanilla`."""
    ratio = (logp - old).clamp(-20.0, 20.0).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantage < 0, torch.min(-advantage * dual, loss), loss)


def verl_reduced(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """`agg_loss` on one rank; the width of the mask is `data.max_response_length`."""
    sums, lengths = (losses * mask).sum(-1), mask.sum(-1)
    acted = (lengths > 0).to(losses.dtype)
    if mode == "token-mean":
        return sums.sum() / mask.sum()
    if mode == "seq-mean-token-mean":
        return (sums / (lengths + 1e-8) * acted).sum() / acted.sum()
    total = (sums * acted).sum() / acted.sum()
    return total / mask.shape[-1] if mode == "seq-mean-token-sum-norm" else total


def verl_grpo(scores: Tensor, groups: Tensor, *, by_std: bool = True) -> Tensor:
    """Advantages of the estimator `grpo`, [rows]."""
    out = torch.empty_like(scores)
    for group in groups.unique():
        member = groups == group
        own = scores[member]
        mean, std = (own.mean(), own.std()) if len(own) > 1 else (torch.tensor(0.0), torch.tensor(1.0))
        out[member] = (own - mean) / (std + 1e-6) if by_std else own - mean
    return out


def verl_rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """Advantages of the estimator `rloo`, [rows]."""
    out = scores.clone()
    for group in groups.unique():
        member = groups == group
        own, n = scores[member], int(member.sum())
        if n > 1:
            out[member] = own * n / (n - 1) - own.mean() * n / (n - 1)
    return out


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages, whitened, and returns of the estimator `gae`."""
    following, carried = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        gap = rewards[:, t] + gamma * following - values[:, t]
        here = mask[:, t]
        carried = (gap + gamma * lam * carried) * here + (1 - here) * carried
        following = values[:, t] * here + (1 - here) * following
        columns.append(carried)
    advantages = torch.stack(columns[::-1], dim=1)
    return verl_whiten(advantages, mask), advantages + values


def verl_reinforce(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Advantages of the estimator `reinforce_plus_plus`."""
    returns, carried = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        carried = (rewards[:, t] + gamma * carried) * here + carried * (1 - here)
        returns[:, t] = carried * here
    return verl_whiten(returns, mask) * mask


def verl_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`masked_whiten`: mean 0, and variance 1 with Bessel's correction."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count * count / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def verl_value(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """The critic's loss per token, before its reduction."""
    near = values.clamp(old - clip, old + clip)
    return 0.5 * torch.max((values - returns).square(), (near - returns).square())
