"""Draw constrained rows with the code of the engines, which decides log-probs, and what is an action."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tutelage.certify.scene import Rows
from tutelage.certify.toy import TEMPERATURE, VOCABULARY, Toy, ToyMasks
from tutelage.engines.contract import Generation, Sampling
from tutelage.engines.text_draws import next_tokens
from tutelage.policy.constraints import Allowed, ConstrainedSpan, allowed_at
from tutelage.policy.text import log_probs

UNLIKELY = 1e-12


def as_drawn(sampler: Toy, rows: Rows) -> tuple[Rows, Tensor]:
    """Return the rows with the actions that the engine's code makes of them, and the log-probs of these [actions].

    The uniform numbers are chosen such that the tokens of the rows are drawn. A token that is too unlikely to be drawn
    gets its log-prob from the distribution.
    """
    masks, behaviour, gap = [], [], []
    gaps = rows.gap.split([int(mask.sum()) for mask in rows.masks])
    for tokens, mask, spans, apart in zip(rows.tokens, rows.masks, rows.spans, gaps, strict=True):
        written = mask.clone()
        for start, end, _ in spans:
            written[start:end] = True
        at = written.nonzero().squeeze(-1)
        turn = _drawn(sampler.logits(sampler.plain([tokens])[0, at - 1]) / TEMPERATURE, tokens, at, spans)
        made = torch.zeros_like(mask)
        made[at] = turn.acted
        along = torch.zeros(len(tokens), dtype=torch.float64)
        along[mask] = apart
        masks.append(made)
        behaviour.append(turn.logp[turn.acted] + along[made].to(turn.logp.dtype))
        gap.append(along[made])
    return replace(rows, masks=tuple(masks), gap=torch.cat(gap)), torch.cat(behaviour)


def _drawn(logits: Tensor, tokens: Tensor, at: Tensor, spans: tuple[ConstrainedSpan, ...]) -> Generation:
    """Draw the tokens at these positions of a row, from their logits [positions, vocabulary]."""
    found = Allowed.of(allowed_at(ToyMasks(), tokens.tolist(), spans, at.tolist()), VOCABULARY)
    allowed = found.at(slice(None), logits.device)
    inside = torch.ones_like(logits, dtype=torch.bool) if allowed is None else allowed
    likely = torch.where(inside, logits, torch.full_like(logits, -torch.inf)).softmax(-1)
    taken = tokens[at, None]
    numbers = (likely.cumsum(-1) - likely / 2).gather(-1, taken).squeeze(-1)
    drawn = next_tokens(logits, [Sampling()] * len(at), [0] * len(at), numbers.tolist(), allowed) if len(at) else []
    hit = torch.tensor([token.id for token in drawn], dtype=torch.int64) == taken.squeeze(-1)
    assert bool((hit | (likely.gather(-1, taken).squeeze(-1) < UNLIKELY)).all())
    logp = torch.tensor([token.logp for token in drawn], dtype=logits.dtype)
    return Generation(
        tokens=tokens[at],
        logp=torch.where(hit, logp, log_probs(logits, 1.0, allowed).gather(-1, taken).squeeze(-1)),
        version=torch.zeros(len(at), dtype=torch.int32),
        finish="stop",
        forced=inside.sum(-1) == 1,
    )
