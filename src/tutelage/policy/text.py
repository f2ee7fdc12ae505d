"""What sampler and learner both compute for text: the tempered distribution, the log-prob of a token, the draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """In float32 at least: half precision is widened, float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def tempered(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits after temperature, in float32 at least; 0 (greedy) means temperature 1 here."""
    return wide(logits) if temperature in (0.0, 1.0) else wide(logits) / temperature


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[…, vocabulary] log-probabilities after temperature."""
    return torch.log_softmax(tempered(logits, temperature), dim=-1)


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
    scaled = logits.float() if bool((temperature == 1).all()) else logits.float() / temperature[:, None]
    probs = torch.softmax(scaled, dim=-1)
    kept = probs
    if banned is not None:
        kept = kept.masked_fill(banned, 0.0)
    if settings.truncated:
        kept = _truncate(kept, settings.top_p, settings.top_k)
    ids, total = _inverse_transform(kept, uniform)
    ids = torch.where(greedy, kept.argmax(dim=-1), ids) if bool(greedy.any()) else ids
    mass_cut = torch.zeros(len(logits), device=logits.device)
    if banned is not None or settings.truncated:
        mass_cut = (1.0 - total).clamp_min(0.0).float()
    lost = total == 0
    if banned is not None and bool(lost.any()):
        # Banned ids hold all the mass that float32 can show: the others are drawn in proportion among themselves.
        rest = draw(logits.masked_fill(banned, float("-inf")), uniform, settings)
        ids = torch.where(lost, rest.ids, ids)
        return Draw(ids, torch.log_softmax(scaled, dim=-1).gather(-1, ids[:, None]).squeeze(-1), mass_cut)
    return Draw(ids, probs.gather(-1, ids[:, None]).squeeze(-1).log(), mass_cut)


BLOCK = 256
"""Probabilities are first summed over blocks, so that only one block of each row is summed up id by id."""


def _inverse_transform(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The id at which the cumulative probability of each row passes `uniform` of its total, and that total."""
    rows, size = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -size % BLOCK)) if size % BLOCK else probs
    padded = padded.reshape(rows, -1, BLOCK)
    blocks = padded.sum(dim=-1, dtype=torch.float64)
    ends = blocks.cumsum(dim=-1)
    total = ends[:, -1]
    target = (uniform.double() * total)[:, None]
    block = torch.searchsorted(ends, target, right=True).clamp_max(ends.shape[1] - 1)
    block = torch.where(blocks.gather(1, block) > 0, block, blocks.argmax(dim=-1, keepdim=True))
    before = ends.gather(1, block) - blocks.gather(1, block)
    inside = padded[torch.arange(rows, device=padded.device), block[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    within = torch.searchsorted(inside, (target - before).clamp_min(0.0), right=True)
    # Rounding may put the target at the very end: the last id of the block that can be drawn is meant then.
    drawable = padded[torch.arange(rows, device=padded.device), block[:, 0]] > 0
    last = BLOCK - 1 - drawable.flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(within, last)).squeeze(-1), total


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what lies outside the k most likely ids, then outside the smallest set of mass top_p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, probs.shape[-1]))
    ordered = ordered.masked_fill(rank >= limit[:, None], 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    outside = before >= top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    # Sums in float32 do not add up to the last digit: without the second condition top_p = 1 would cut a little.
    ordered = ordered.masked_fill(outside & (top_p < 1.0)[:, None], 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)
