"""Check the learner's log-probs against the model's own forward pass, once per run, on a few rows of its first batch.

Sampler and learner use the same packs and the same attention, so no other metric shows an error that they share. Here
the model computes one row at a time, with its own modules and eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.data.trajectory import Batch
from tutelage.errors import UserError
from tutelage.learner.ranks import Ranks
from tutelage.learner.text import Limits
from tutelage.learner.update import measure
from tutelage.losses.contract import Loss
from tutelage.models.causal_lm import CausalLM
from tutelage.policy.constraints import Allowed
from tutelage.policy.text import log_probs

ROWS = 4
"""Number of rows compared: the longest, which exceed attention windows, and the shortest, which share their pack."""
LIMIT, HALF_LIMIT = 1e-3, 5e-2
"""Nats by which the log-prob of a token may differ, in float32 and in half precision."""
SHARE = 0.01
"""Share of tokens that may differ by more: a mixture of experts may break a tie differently."""
ROUNDING = 2.0
"""In half precision, larger gaps pass if the learner is on average at most this many times as far from the model in
float32 as the model's own half precision is: rounding then explains them."""


SCORES = 2**28
"""Maximum number of attention scores per layer in eager attention; longer rows are truncated to fit."""


@dataclass(slots=True)
class ReferenceCheck:
    """Checks the first batch that has actions, and none after it."""

    reader: Loss
    """reports the learner's log-probs in the column of the same name"""
    cut: Limits
    done: bool = False

    def __call__(self, model: CausalLM, batch: Batch, ranks: Ranks) -> dict[str, float]:
        """Return `reference_gap` and `reference_gap_max`: the median and the largest difference in nats. Where they
        are large because half precision rounds much, `reference_rounding` is the mean error of the model's own pass.

        Raises UserError if the model computes something else on packs than in its own forward pass. With several
        ranks, each compares some of its own rows, and all of them compute together.
        """
        if self.done:
            return {}
        part = batch.select(_chosen(batch, max(1, ROWS // ranks.count)))
        found = measure(model, part, [self.reader], self.cut, ranks).get(self.reader.name)
        learned = [] if found is None else found.rows()
        own = [self._own_logp(model, *row) for row in self._rows(part, max(ranks.all(len(part))))]
        ranks.settle(model)
        near = [_gaps(mine[: len(logp)].float(), logp) for (logp, _), mine in zip(own, learned, strict=False)]
        gathered = ranks.all((torch.cat(near) if near else torch.empty(0), any(half for _, half in own)))
        gaps = torch.cat([gap for gap, _ in gathered])
        if not len(gaps):
            return {}
        self.done = True
        half, metrics = any(half for _, half in gathered), dict[str, float]()
        if half and ranks.count == 1 and not within(gaps, HALF_LIMIT):
            metrics = self._rounding(model, part, [logp for logp, _ in own], learned)
        if not metrics:
            verify(gaps, HALF_LIMIT if half else LIMIT, type(model.model).__name__)
        return {"reference_gap": float(gaps.median()), "reference_gap_max": float(gaps.max()), **metrics}

    def _rounding(
        self, model: CausalLM, part: Batch, own: Sequence[Tensor], learned: Sequence[Tensor]
    ) -> dict[str, float]:
        """Return `reference_rounding` if rounding explains how far the learner is from the model; else nothing."""
        with model.in_float32():
            exact = [self._own_logp(model, *row)[0] for row in self._rows(part, len(part))]
        rounded, mistaken = (
            float(torch.cat([_gaps(row[: len(e)].float(), e) for row, e in zip(rows, exact, strict=True)]).mean())
            for rows in (own, learned)
        )
        return {"reference_rounding": rounded} if mistaken <= ROUNDING * rounded else {}

    def _rows(self, part: Batch, passes: int) -> Iterator[tuple[Tensor, Tensor, Allowed | None]]:
        """Yield the tokens and mask of each row, and the ids that could be drawn at its actions. A rank with fewer rows
        than others adds rows of one masked token."""
        for row in range(len(part)):
            alone = part.select([row])
            yield part.columns["tokens"].row(row), part.columns["mask"].row(row), self.cut.allowed(alone)
        for _ in range(passes - len(part)):
            yield torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool), None

    @torch.no_grad()
    def _own_logp(
        self, model: CausalLM, tokens: Tensor, mask: Tensor, allowed: Allowed | None = None
    ) -> tuple[Tensor, bool]:
        """Return the log-probs [actions] of a row's actions, and whether the model computes in half precision."""
        heads = int(model.model.config.get_text_config().num_attention_heads)
        tokens = tokens[: max(2, int((SCORES / heads) ** 0.5))]
        actions = mask[: len(tokens)].nonzero().squeeze(-1)
        hidden = model.own_states(tokens)
        states, found = hidden[(actions - 1).to(hidden.device)], [torch.empty(0)]
        for at in range(0, len(actions), self.cut.logit_tokens):
            here = slice(at, at + self.cut.logit_tokens)
            inside = allowed.at(here, hidden.device) if allowed is not None else None
            logp = log_probs(model.head(states[here], self.cut.vocabulary), self.cut.temperature, inside)
            found.append(logp.gather(-1, tokens[actions[here], None].to(hidden.device)).squeeze(-1).float().cpu())
        return torch.cat(found), hidden.dtype in (torch.bfloat16, torch.float16)


def verify(gaps: Tensor, limit: float, name: str) -> None:
    """Raise UserError if these gaps are not within the limit."""
    if within(gaps, limit):
        return
    median, above = float(gaps.median()), _above(gaps, limit)
    raise UserError(
        f"the learner computes something else than the model: on {len(gaps)} tokens of the first batch, its log-probs "
        f"differ from those of {name}'s own forward pass (no packs, eager attention) by {median:.2g} nats in the "
        f"median, and by more than {limit:g} in {above} tokens ({above / len(gaps):.1%}). The run would learn from "
        "wrong probabilities, so it stops before the update. Use another model, and please report this one"
    )


def within(gaps: Tensor, limit: float) -> bool:
    """Whether the median of these gaps, and all but a few of them, are at most the limit. One may always be larger."""
    return float(gaps.median()) <= limit and _above(gaps, limit) <= max(1, SHARE * len(gaps))


def _above(gaps: Tensor, limit: float) -> int:
    return int((~(gaps <= limit)).sum())  # NaN counts as above


def _gaps(learned: Tensor, own: Tensor) -> Tensor:
    """Return the gaps [actions] in nats; 0 where the model's own log-prob is not finite, which the loss reports."""
    return torch.where(torch.isfinite(own), (learned - own).abs(), 0.0)


def _chosen(batch: Batch, rows: int) -> list[int]:
    """Return the numbers of the longest and the shortest rows that have actions, in ascending order."""
    lengths, masks = batch.columns["tokens"].lengths.tolist(), batch.columns["mask"].rows()
    acting = sorted((row for row, mask in enumerate(masks) if bool(mask.any())), key=lambda row: (-lengths[row], row))
    few = -(-rows // 2)
    return sorted({*acting[:few], *acting[max(few, len(acting) - rows + few) :]})
