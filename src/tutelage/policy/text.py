"""Computations that sampler and learner share for text: the distribution after temperature and within a constraint,
log-probs, sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BARRED = -1e30
"""The logit of an id that may not be written. Its probability is exactly 0, and as it is finite, 0 · log 0 is 0."""
ABSENT = -1e4
"""The log-prob of an outcome that exists on neither side: its probability is 0, and so is any difference."""


def wide(values: Tensor) -> Tensor:
    """Convert to float32, unless the values are float64."""
    return values if values.dtype == torch.float64 else values.float()


def tempered(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Divide logits by the temperature, in at least float32; 0 (greedy) counts as 1."""
    return wide(logits) if temperature in (0.0, 1.0) else wide(logits) / temperature


def restricted(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Give the ids that are not `allowed`, bool […, vocabulary], a probability of 0; None allows all ids."""
    return logits if allowed is None else logits.masked_fill(~allowed, BARRED)


def log_probs(logits: Tensor, temperature: float = 1.0, allowed: Tensor | None = None) -> Tensor:
    """Compute log-probs […, vocabulary] after temperature, within the `allowed` ids; those of others are ABSENT."""
    found = torch.log_softmax(restricted(tempered(logits, temperature), allowed), dim=-1)
    return found if allowed is None else found.masked_fill(~allowed, ABSENT)


def renormalised(log_probs: Tensor, allowed: Tensor | None) -> Tensor:
    """Restrict log-probs […, vocabulary] to the `allowed` ids and normalise them again; those of others are ABSENT."""
    if allowed is None:
        return log_probs
    inside = log_probs.masked_fill(~allowed, float("-inf"))
    return (inside - inside.logsumexp(-1, keepdim=True)).masked_fill(~allowed, ABSENT)


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled token per row, its log-prob before truncation, and the mass that truncation removed."""

    ids: Tensor
    logp: Tensor
    mass_cut: Tensor


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Per-row sampling settings; tensors are [rows]."""

    temperature: Tensor
    """0 means greedy"""
    top_p: Tensor
    top_k: Tensor
    """0 means off"""
    truncated: bool
    """whether any row uses top_p or top_k"""


def uniform_numbers(seed: int, count: int) -> Tensor:
    """Return float64 [count] in [0, 1): token i of a request with this seed is drawn with number i. They come from the
    CPU, so that a request gets the same ones on every device."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(logits: Tensor, uniform: Tensor, settings: DrawSettings, banned: Tensor | None = None) -> Draw:
    """Draw one token per row by inverse transform: row i depends only on its own logits and uniform number.

    logits [rows, vocabulary], uniform [rows] in [0, 1), banned bool [rows, vocabulary]: ids that may not be drawn.
    """
    greedy = settings.temperature == 0
    temperature = torch.where(greedy, torch.ones_like(settings.temperature), settings.temperature)
    scaled = wide(logits) if bool((temperature == 1).all()) else wide(logits) / temperature[:, None]
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
        # Banned ids hold all of the mass in float32: draw from the others, renormalised.
        rest = draw(logits.masked_fill(banned, float("-inf")), uniform, settings)
        ids = torch.where(lost, rest.ids, ids)
        return Draw(ids, torch.log_softmax(scaled, dim=-1).gather(-1, ids[:, None]).squeeze(-1), mass_cut)
    return Draw(ids, probs.gather(-1, ids[:, None]).squeeze(-1).log(), mass_cut)


BLOCK = 256
"""Probabilities are first summed per block, so that only one block of each row needs a cumulative sum."""


def _inverse_transform(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id where the cumulative probability of each row exceeds `uniform` times its total, and the total."""
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
    # Rounding may put the target past the end: then take the last id of the block that has any probability.
    drawable = padded[torch.arange(rows, device=padded.device), block[:, 0]] > 0
    last = BLOCK - 1 - drawable.flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(within, last)).squeeze(-1), total


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set to zero all but the k most likely ids, then all outside the smallest set with mass top_p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, probs.shape[-1]))
    ordered = ordered.masked_fill(rank >= limit[:, None], 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    outside = before >= top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    # float32 sums are not exact: without the second condition, top_p = 1 would remove a little mass.
    ordered = ordered.masked_fill(outside & (top_p < 1.0)[:, None], 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)
