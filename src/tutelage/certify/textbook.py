"""Textbook formulas in float64, without regard to speed or extreme values.

They do not use the package's losses, because the results of the learner are compared with them. Divergences are sums
over outcomes and are defined by the term of one outcome; estimates use the sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch
from torch import Tensor

from tutelage.algorithms.objectives import OBJECTIVES, Objective, Settings
from tutelage.certify.scene import ABSENT, TOP_K, View

Term = Callable[[Tensor, Tensor, Settings], Tensor]
"""Maps log q and log p of outcomes, of the same shape, to the term of each outcome."""
Scalar = Callable[[View], Tensor]
"""A scalar whose gradient is compared."""
PerAction = Callable[[View], Tensor]
"""Values per action, [actions]."""


def _jsd(q: Tensor, p: Tensor, s: Settings) -> Tensor:
    mixture = (s.beta * p.exp() + (1 - s.beta) * q.exp()).log()
    return s.beta * p.exp() * (p - mixture) + (1 - s.beta) * q.exp() * (q - mixture)


DIVERGENCES: Mapping[str, Term] = {
    "reverse_kl": lambda q, p, s: q.exp() * (q - p),
    "forward_kl": lambda q, p, s: p.exp() * (p - q),
    "jsd": _jsd,
    "skewed_kl": lambda q, p, s: p.exp() * (p - (s.alpha * p.exp() + (1 - s.alpha) * q.exp()).log()),
    "total_variation": lambda q, p, s: (q.exp() - p.exp()).abs(),
}

ESTIMATES: Mapping[str, Term] = {
    "k1": lambda q, p, s: q - p,
    "k2": lambda q, p, s: (q - p) ** 2 / 2,
    "mse": lambda q, p, s: (q - p) ** 2 / 2,
    "k3": lambda q, p, s: p.exp() / q.exp() - 1 - (p - q),
    "abs": lambda q, p, s: (q - p).abs(),
    "low_var_kl": lambda q, p, s: (p.exp() / q.exp() - 1 - (p - q)).clamp(-10, 10),
}
"""Log-ratios of the toys stay within ±20, so the inner clamp of low_var_kl has no effect."""


def outcomes(seen: View, payload: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of student and teacher [actions, vocabulary + 1], and a bool mask of that shape for the
    outcomes that exist: the ids in the payload, and one last outcome for all others. The full payload has all ids that
    are allowed."""
    named = seen.allowed
    if payload != "full":
        own, theirs = (x.detach().topk(TOP_K, dim=-1).indices for x in (seen.student, seen.teacher))
        chosen = {"top_k": [theirs], "student_top_k": [own], "union": [own, theirs]}[payload]
        named = torch.zeros_like(named).scatter(-1, torch.cat(chosen, dim=-1), True)
    rest = (seen.allowed & ~named).any(-1, keepdim=True)
    present = torch.cat([named, rest], dim=-1)
    return _buckets(seen.student, named, present), _buckets(seen.teacher, named, present), present


def _buckets(log_probs: Tensor, named: Tensor, present: Tensor) -> Tensor:
    rest = log_probs.exp().masked_fill(named, 0.0).sum(-1, keepdim=True)
    rest = torch.where(present[:, -1:], rest, torch.ones_like(rest)).log()
    return torch.cat([log_probs, rest], dim=-1).masked_fill(~present, ABSENT)


def divergence(name: str, settings: Settings, payload: str = "full") -> PerAction:
    """Return a divergence at every visited state. An unknown name is an objective that claims itself."""
    if name not in DIVERGENCES:
        return _itself(OBJECTIVES[name], settings, payload)
    term = DIVERGENCES[name]

    def values(seen: View) -> Tensor:
        q, p, present = outcomes(seen, payload)
        terms = term(q.masked_fill(~present, 0.0), p.masked_fill(~present, 0.0), settings)
        return torch.where(present, terms, torch.zeros_like(terms)).sum(-1)

    return values


def _itself(objective: Objective, settings: Settings, payload: str) -> PerAction:
    """Return the objective's own value; for a formula over the sampled token, its mean over all tokens."""

    def values(seen: View) -> Tensor:
        if objective.sees == "token":
            flat = objective.formula(seen.student.flatten(), seen.teacher.flatten(), settings)
            return (seen.student.exp() * flat.view_as(seen.student)).sum(-1)
        return whole(objective, settings, payload)(seen)

    return values


def whole(objective: Objective, settings: Settings, payload: str) -> PerAction:
    """Apply a user's formula to the outcomes of a payload, for all actions at once."""

    def values(seen: View) -> Tensor:
        if objective.sees == "top_k":
            ids = seen.teacher.topk(TOP_K, dim=-1).indices
            return objective.formula(seen.student.gather(-1, ids), seen.teacher.gather(-1, ids), settings)
        if payload == "full":
            return objective.formula(seen.student, seen.teacher, settings)
        q, p, _ = outcomes(seen, payload)
        return objective.formula(q, p, settings)

    return values


# ── targets: expectations over all possible sequences ────────────────────────────────────────────────────────────────


def probability(seen: View) -> Tensor:
    """Return the probability of each sequence, [rows]."""
    return seen.per_row(seen.taken(seen.student)).exp()


def drawn(seen: View) -> Tensor:
    """Return the probability of each sequence under the sampler, [rows]."""
    return seen.per_row(seen.taken(seen.sampler)).exp()


def surrogate(seen: View) -> Tensor:
    """Return minus the expected reward if one action of a sequence comes from the student and the others from the
    sampler, summed over the actions, per action. If student and sampler are equal, its gradient is that of the expected
    reward.
    """
    ratio = (seen.taken(seen.student) - seen.taken(seen.sampler)).exp()
    return -(drawn(seen)[seen.row] * ratio * seen.rewards[seen.row]).sum() / seen.lengths[0]


def at_states(values: PerAction) -> Scalar:
    """Return the expectation over visited states, which are held fixed, per action."""

    def target(seen: View) -> Tensor:
        return (drawn(seen)[seen.row] * values(seen)).sum() / seen.lengths[0]

    return target


def of_sequences(name: str, settings: Settings) -> Scalar:
    """Return the divergence between the distributions of whole sequences, per action."""
    term = DIVERGENCES[name]

    def target(seen: View) -> Tensor:
        q, p = (seen.per_row(seen.taken(x)) for x in (seen.student, seen.teacher))
        return term(q, p, settings).sum() / seen.lengths[0]

    return target


def through_states(values: PerAction) -> Scalar:
    """Return the expected sum along the student's sequences, with the gradient through visited states, per action."""

    def target(seen: View) -> Tensor:
        return (probability(seen)[seen.row] * values(seen)).sum() / seen.lengths[0]

    return target


def negative_reward(seen: View) -> Tensor:
    """Return minus the expected reward, per action."""
    return -(probability(seen) * seen.rewards).sum() / seen.lengths[0]


def combined(*terms: tuple[float, Scalar]) -> Scalar:
    """Return a weighted sum of targets."""
    return lambda seen: torch.stack([weight * term(seen) for weight, term in terms]).sum()


# ── losses of a batch ────────────────────────────────────────────────────────────────────────────────────────────────


def clipped(logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return PPO's loss with the defaults of the schema: a range of 0.8 to 1.2 and a dual clip of 3."""
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss)


def supervised(objective: Objective, settings: Settings, payload: str) -> PerAction:
    """Return the loss of the differentiated formula."""
    if objective.name in ESTIMATES or objective.sees == "token":
        return lambda seen: _estimate(objective, settings)(seen.taken(seen.student), seen.taken(seen.teacher))
    if objective.name == "forward_kl_topk":
        return _as_verl_has_it
    if objective.name in DIVERGENCES:
        return divergence(objective.name, settings, payload)
    return whole(objective, settings, payload)


def _estimate(objective: Objective, settings: Settings) -> Callable[[Tensor, Tensor], Tensor]:
    formula = ESTIMATES.get(objective.name, objective.formula)
    return lambda q, p: formula(q, p, settings)


def _as_verl_has_it(seen: View) -> Tensor:
    p, ids = seen.teacher.topk(TOP_K, dim=-1)
    p, q = p.clamp(min=-10), seen.student.gather(-1, ids).clamp(min=-10)
    return (p.exp() * (p - q)).sum(-1).clamp(0, 10)


def as_reward(objective: Objective, settings: Settings, discount: int) -> PerAction:
    """Return the policy-gradient loss whose advantage is the negative of the formula."""

    def losses(seen: View) -> Tensor:
        own = _estimate(objective, settings)(seen.behaviour, seen.taken(seen.teacher)).tolist()
        rows = seen.row.tolist()
        advantage = [
            -sum(own[later] for later in range(at, len(own) if discount else at + 1) if rows[later] == rows[at])
            for at in range(len(own))
        ]
        return clipped(seen.taken(seen.student), seen.behaviour, seen.rewards.new_tensor(advantage))

    return losses


def token_mean(losses: PerAction) -> Scalar:
    """Return the mean over all actions of all rows."""
    return lambda seen: losses(seen).sum() / len(seen.ids)


def sequence_mean(losses: PerAction) -> Scalar:
    """Return the mean over rows of the means over their actions."""
    return lambda seen: (seen.per_row(losses(seen)) / seen.lengths.clamp(min=1)).sum() / (seen.lengths > 0).sum()


def sequence_sum(longest: int) -> Callable[[PerAction], Scalar]:
    """Return the sum over all actions, divided by the number of rows and the maximum answer length."""
    return lambda losses: lambda seen: losses(seen).sum() / ((seen.lengths > 0).sum() * longest)


def group_advantages(seen: View, baseline: str, scale: str) -> Tensor:
    """Return the group-relative advantages [actions]; the reward of an episode is that of its last row."""
    reward_of = {key.episode: float(reward) for key, reward in zip(seen.keys, seen.rewards, strict=True)}
    advantage: dict[object, float] = {}
    everyone = torch.tensor(list(reward_of.values()), dtype=torch.float64)
    for _, members in groupby(reward_of, key=lambda episode: episode.group):
        episodes = list(members)
        rewards = torch.tensor([reward_of[episode] for episode in episodes], dtype=torch.float64)
        for number, episode in enumerate(episodes):
            others = torch.cat([rewards[:number], rewards[number + 1 :]])
            level = {
                "mean": rewards.mean(),
                "leave_one_out": others.mean() if len(others) else rewards[0],
                "none": torch.tensor(0.0),
            }[baseline]
            spread = {"group_std": rewards, "batch_std": everyone}.get(scale)
            divisor = 1.0 if spread is None or len(spread) < 2 else float(spread.std()) + 1e-4
            advantage[episode] = float(rewards[number] - level) / divisor
    return torch.tensor([advantage[key.episode] for key in seen.keys], dtype=seen.rewards.dtype)[seen.row]


def final_reward(seen: View) -> Tensor:
    """Return the episode's reward at the last action of each of its rows, and 0 before, [actions]."""
    reward_of = {key.episode: float(reward) for key, reward in zip(seen.keys, seen.rewards, strict=True)}
    result = torch.zeros_like(seen.behaviour)
    for number, key in enumerate(seen.keys):
        places = (seen.row == number).nonzero().squeeze(-1)
        if len(places):
            result[places[-1]] = reward_of[key.episode]
    return result


def general_advantages(seen: View, rewards: Tensor, lam: float) -> Tensor:
    """Return the GAE advantages [actions] without a discount, by definition: Σ λ^(u − t) δ_u."""
    values, rows = seen.values.detach(), seen.row.tolist()
    last = len(rows) - 1
    delta = [
        float(rewards[t]) + (float(values[t + 1]) if t < last and rows[t + 1] == rows[t] else 0.0) - float(values[t])
        for t in range(len(rows))
    ]
    return rewards.new_tensor(
        [sum(lam ** (u - t) * delta[u] for u in range(t, len(rows)) if rows[u] == rows[t]) for t in range(len(rows))]
    )


def white(values: Tensor) -> Tensor:
    """Normalise to mean 0 and variance 1."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + 1e-8).sqrt()
