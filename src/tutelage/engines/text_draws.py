"""From logits to the next tokens: the draw that every engine for text shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.engines.contract import Sampling
from tutelage.policy.text import DrawSettings, draw, restricted


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token that was drawn for one sequence."""

    id: int
    logp: float
    """after temperature, within what is allowed, before truncation"""
    mass_cut: float
    top_ids: Tensor | None
    """int64 [k]: if they were asked for"""


def next_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    written: Sequence[int],
    numbers: Sequence[float],
    allowed: Tensor | None = None,
) -> list[NextToken]:
    """Draw one token for each row of the logits [rows, vocabulary]. `written` is the number of tokens that the answer
    has already, and `numbers` the uniform number that draws its next one. `allowed`, bool [rows, vocabulary], are the
    ids that the constraints of the answers allow, if some have one."""
    device = logits.device
    logits = restricted(logits, allowed)
    settings = DrawSettings(
        temperature=torch.tensor([s.temperature for s in samplings], device=device),
        top_p=torch.tensor([s.top_p for s in samplings], device=device),
        top_k=torch.tensor([s.top_k for s in samplings], device=device),
        truncated=any(s.top_p < 1.0 or s.top_k > 0 for s in samplings),
    )
    uniform = torch.tensor(numbers, dtype=torch.float64, device=device)
    drawn = draw(logits, uniform, settings, _banned(logits, samplings, written, allowed))
    wanted = min(max(s.top_ids for s in samplings), logits.shape[-1])
    best = logits.topk(wanted, dim=-1).indices.cpu() if wanted else None
    return [
        NextToken(
            id, logp, cut, best[row, : sampling.top_ids].clone() if best is not None and sampling.top_ids else None
        )
        for row, (sampling, id, logp, cut) in enumerate(
            zip(samplings, drawn.ids.tolist(), drawn.logp.tolist(), drawn.mass_cut.tolist(), strict=True)
        )
    ]


def stacked_top_ids(sampling: Sampling, found: Sequence[Tensor | None]) -> Tensor | None:
    """Return the `top_ids` of an answer, int64 [tokens, k]; None if they were not asked for."""
    if not sampling.top_ids:
        return None
    rows = [row for row in found if row is not None]
    return torch.stack(rows) if rows else torch.empty(0, sampling.top_ids, dtype=torch.int64)


def _banned(
    logits: Tensor, samplings: Sequence[Sampling], written: Sequence[int], allowed: Tensor | None
) -> Tensor | None:
    """Stop ids may not be drawn before min_tokens, except where a constraint allows nothing else."""
    early = [
        (row, list(sampling.stop_ids))
        for row, (sampling, count) in enumerate(zip(samplings, written, strict=True))
        if count < sampling.min_tokens and sampling.stop_ids
    ]
    if not early:
        return None
    banned = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in early:
        banned[row, ids] = True
    if allowed is not None:
        banned &= (allowed & ~banned).any(-1, keepdim=True)
    return banned
