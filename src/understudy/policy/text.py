"""What sampler and learner both compute for text: the tempered distribution, the log-prob of a token, the draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[…, vocabulary] log-probabilities in float32 after temperature; 0 (greedy) means temperature 1 here."""
    scaled = logits.float() if temperature in (0.0, 1.0) else logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1)


def token_logp(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[…] log-probability of the given ids under `log_probs`."""
    return log_probs(logits, temperature).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each row, with its log-prob before truncation and the mass that truncation removed."""

    ids: Tensor
    logp: Tensor
    mass_cut: Tensor


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Per-row settings of one draw; tensors of length rows."""

    temperature: Tensor
    """0 is greedy"""
    top_p: Tensor
    top_k: Tensor
    """0 is off"""
    truncated: bool
    """whether any row has top_p or top_k"""


def draw(logits: Tensor, uniform: Tensor, settings: DrawSettings, banned: Tensor | None = None) -> Draw:
    """Draw one token a row by inverse transform: row i depends on its own logits and uniform number alone.

    logits [rows, vocabulary], uniform [rows] in [0, 1), banned bool [rows, vocabulary]: ids that may not be drawn.
    """
    greedy = settings.temperature == 0
    temperature = torch.where(greedy, torch.ones_like(settings.temperature), settings.temperature)
    logp = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    probs = logp.exp()
    kept = probs
    if banned is not None:
        kept = kept.masked_fill(banned, 0.0)
    if settings.truncated:
        kept = _truncate(kept, settings.top_p, settings.top_k)
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, uniform[:, None].double() * total, right=True).squeeze(-1)
    best = kept.argmax(dim=-1)
    ids = torch.where(greedy | (sampled >= logits.shape[-1]), best, sampled)
    mass_cut = (1.0 - total.squeeze(-1) / probs.sum(dim=-1, dtype=torch.float64)).clamp_min(0.0).float()
    if banned is None and not settings.truncated:
        mass_cut = torch.zeros_like(mass_cut)
    return Draw(ids, logp.gather(-1, ids[:, None]).squeeze(-1), mass_cut)


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what lies outside the k most likely ids, then outside the smallest set of mass top_p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, probs.shape[-1]))
    ordered = ordered.masked_fill(rank >= limit[:, None], 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p[:, None] * ordered.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)
