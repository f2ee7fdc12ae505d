"""Differences between log-probs that should be equal, and the model's plain forward pass to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.learner.reference import HALF_LIMIT, LIMIT, SCORES, SHARE
from tutelage.models.causal_lm import CausalLM
from tutelage.policy.text import log_probs

ROWS_AT_ONCE = 128
"""Positions whose distributions exist at once."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two sets of log-probs are apart, in nats."""

    values: Tensor
    """float [tokens]"""
    limit: float

    @classmethod
    def between(cls, first: Tensor, second: Tensor, *, half: bool) -> Gap:
        """The gap between log-probs [tokens, …]; over further dimensions it is the largest. `half` allows for half
        precision."""
        apart = (first.double() - second.double()).abs()
        values = apart.flatten(1).amax(1) if apart.dim() > 1 else apart
        return cls(values.nan_to_num(torch.inf), HALF_LIMIT if half else LIMIT)

    @classmethod
    def joined(cls, gaps: list[Gap]) -> Gap:
        return cls(torch.cat([gap.values for gap in gaps]), max(gap.limit for gap in gaps))

    @property
    def small(self) -> bool:
        """Whether this is rounding: the median and nearly all tokens are below the limit."""
        if not len(self.values):
            return True
        above = int((self.values > self.limit).sum())
        return float(self.values.median()) <= self.limit and above <= max(1, SHARE * len(self.values))

    def __str__(self) -> str:
        if not len(self.values):
            return "no tokens"
        return f"{float(self.values.median()):.1g} nats in the median, at most {float(self.values.max()):.1g}"


def is_half(model: CausalLM) -> bool:
    return model.model.dtype in (torch.bfloat16, torch.float16)


@torch.no_grad()
def plain_states(model: CausalLM, tokens: Tensor, actions: Tensor) -> Tensor:
    """The final hidden states [actions, width] that the actions at these positions follow from, by the model's own
    modules, eager attention and no pack. Positions beyond what eager attention has memory for are left out."""
    heads = int(model.model.config.get_text_config().num_attention_heads)
    tokens = tokens[: max(2, int((SCORES / heads) ** 0.5))]
    inside = actions[actions < len(tokens)]
    hidden = model.own_states(tokens)
    return hidden[(inside - 1).to(hidden.device)]


@dataclass(frozen=True, slots=True)
class PlainScores:
    """What the plain forward pass says of actions."""

    logp: Tensor
    """float32 [actions]"""
    entropy: Tensor
    """float32 [actions]"""


@torch.no_grad()
def plain_scores(model: CausalLM, tokens: Tensor, actions: Tensor, vocabulary: int, temperature: float) -> PlainScores:
    """Log-prob and entropy at the actions, over the shared vocabulary and after temperature."""
    states = plain_states(model, tokens, actions)
    taken = tokens[actions[: len(states)]]
    logp, entropy = [torch.empty(0)], [torch.empty(0)]
    for at in range(0, len(states), ROWS_AT_ONCE):
        chunk = slice(at, at + ROWS_AT_ONCE)
        distribution = log_probs(model.head(states[chunk], vocabulary), temperature)
        logp.append(_gathered(distribution, taken[chunk, None]).squeeze(-1))
        entropy.append(torch.special.entr(distribution.exp()).sum(-1).float().cpu())
    return PlainScores(torch.cat(logp), torch.cat(entropy))


@torch.no_grad()
def plain_logp(model: CausalLM, states: Tensor, ids: Tensor, vocabulary: int, temperature: float) -> Tensor:
    """Log-probs [actions, k] of these ids [actions, k] after hidden states [actions, width]."""
    found = [torch.empty(0, ids.shape[1])]
    for at in range(0, len(states), ROWS_AT_ONCE):
        chunk = slice(at, at + ROWS_AT_ONCE)
        found.append(_gathered(log_probs(model.head(states[chunk], vocabulary), temperature), ids[chunk]))
    return torch.cat(found)


def _gathered(distribution: Tensor, ids: Tensor) -> Tensor:
    return distribution.gather(-1, ids.to(distribution.device)).float().cpu()
