"""The learner's log-probs against the model's own: once in every run, on a few rows of its first batch.

Sampler and learner compute through the same packs and the same attention, so an error that both share shows in no other
metric. Here the model computes each row by itself: its own modules, eager attention, one row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from tutelage.policy.text import log_probs

ROWS = 4
"""Rows that are compared: the longest, which reach beyond windows, and the shortest, packed together with them."""
LIMIT, HALF_LIMIT = 1e-3, 5e-2
"""Nats by which a token's log-prob may differ where the model computes in float32, and where in fewer bits."""
SHARE = 0.01
"""Of the tokens, so many may differ by more: a mixture of experts may break a tie the other way."""


SCORES = 2**28
"""Attention scores of one layer that eager attention may hold at once; longer rows are compared up to there."""


@dataclass(slots=True)
class ReferenceCheck:
    """Compares the first batch that has actions, and nothing after it."""

    reader: Loss
    """gives the learner's log-probs in the column that it is named after"""
    cut: Limits
    done: bool = False

    def __call__(self, model: CausalLM, batch: Batch, ranks: Ranks) -> dict[str, float]:
        """`reference_gap`: the median difference in nats, over the actions of the rows compared; `reference_gap_max`:
        the largest. Stops the run if the model computes something else on packs than on its own.

        With several ranks each compares some of its own rows, and all of them compute together.
        """
        if self.done:
            return {}
        part = batch.select(_chosen(batch, max(1, ROWS // ranks.count)))
        found = measure(model, part, [self.reader], self.cut, ranks).get(self.reader.name)
        learned = [] if found is None else found.rows()
        own = [self._own_logp(model, tokens, mask) for tokens, mask in _rows(part, max(ranks.all(len(part))))]
        ranks.settle(model)
        near = [_gaps(mine[: len(logp)].float(), logp) for (logp, _), mine in zip(own, learned, strict=False)]
        everyone = ranks.all((torch.cat(near) if near else torch.empty(0), any(half for _, half in own)))
        gaps = torch.cat([gap for gap, _ in everyone])
        if not len(gaps):
            return {}
        self.done = True
        verify(gaps, HALF_LIMIT if any(half for _, half in everyone) else LIMIT, type(model.model).__name__)
        return {"reference_gap": float(gaps.median()), "reference_gap_max": float(gaps.max())}

    @torch.no_grad()
    def _own_logp(self, model: CausalLM, tokens: Tensor, mask: Tensor) -> tuple[Tensor, bool]:
        """[actions]: of the tokens of a row that were taken; and whether the model computes in half precision."""
        heads = int(model.model.config.get_text_config().num_attention_heads)
        tokens = tokens[: max(2, int((SCORES / heads) ** 0.5))]
        actions = mask[: len(tokens)].nonzero().squeeze(-1)
        hidden = model.own_states(tokens)
        states, found = hidden[(actions - 1).to(hidden.device)], [torch.empty(0)]
        for at in range(0, len(actions), self.cut.logit_tokens):
            here = slice(at, at + self.cut.logit_tokens)
            logp = log_probs(model.head(states[here], self.cut.vocabulary), self.cut.temperature)
            found.append(logp.gather(-1, tokens[actions[here], None].to(hidden.device)).squeeze(-1).float().cpu())
        return torch.cat(found), hidden.dtype in (torch.bfloat16, torch.float16)


def verify(gaps: Tensor, limit: float, name: str) -> None:
    """A UserError if the median of these gaps, or too many of them, are above the limit. One never is too many."""
    above = int((~(gaps <= limit)).sum())  # NaN is above
    median = float(gaps.median())
    if median <= limit and above <= max(1, SHARE * len(gaps)):
        return
    raise UserError(
        f"the learner computes something else than the model: on {len(gaps)} tokens of the first batch, its log-probs "
        f"differ from those of {name}'s own forward pass (no packs, eager attention) by {median:.2g} nats in the "
        f"median, and by more than {limit:g} in {above} tokens ({above / len(gaps):.1%}). The run would learn from "
        "wrong probabilities, so it stops before the update. Use another model, and please report this one"
    )


def _gaps(learned: Tensor, own: Tensor) -> Tensor:
    """[actions], in nats. What is not a number in the model itself is no gap: the loss will say it."""
    return torch.where(torch.isfinite(own), (learned - own).abs(), 0.0)


def _chosen(batch: Batch, rows: int) -> list[int]:
    """The longest and the shortest of those that have actions, in order."""
    lengths, masks = batch.columns["tokens"].lengths.tolist(), batch.columns["mask"].rows()
    acting = sorted((row for row, mask in enumerate(masks) if bool(mask.any())), key=lambda row: (-lengths[row], row))
    few = -(-rows // 2)
    return sorted({*acting[:few], *acting[max(few, len(acting) - rows + few) :]})


def _rows(part: Batch, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and mask of each row. A rank with fewer rows than others goes along with a token that nobody took."""
    yield from zip(part.columns["tokens"].rows(), part.columns["mask"].rows(), strict=True)
    for _ in range(passes - len(part)):
        yield torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
