"""From final hidden states to scores: the arithmetic that every engine for text shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.engines.contract import ScoreRequest, Scores, Want
from tutelage.policy.constraints import Allowed
from tutelage.policy.text import log_probs


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How an engine turns logits into log-probs."""

    vocabulary: int | None
    """ids that student and teachers share; None is all"""
    temperature: float = 1.0
    rows: int = 128
    """positions whose logits are in memory at the same time"""

    def __call__(
        self,
        head: Callable[[Tensor], Tensor],
        size: int,
        states: Tensor,
        taken: Tensor,
        want: Want,
        ids: Tensor | None,
        allowed: Allowed | None = None,
    ) -> Scores:
        """Score positions by their states [n, width], on the device of the states; the result is on the CPU.

        `head` maps states to float32 logits [n, size]; `taken` [n] are the tokens that the student took, and `ids`
        [n, k] those that `want.given` is about. `allowed` are the ids to which log-probs are restricted.
        """
        logp, best_ids, best, given, outside = [], [], [], [], []
        narrowed = self.vocabulary is not None and self.vocabulary < size
        if want.sampled or want.top_k or want.given or narrowed:
            taken = taken.to(states.device)
            for at in range(0, len(states), self.rows):
                chunk = slice(at, at + self.rows)
                logits = head(states[chunk])
                if narrowed:
                    outside.append(logits.softmax(-1)[:, self.vocabulary :].sum(-1))
                    logits = logits[:, : self.vocabulary]
                inside = allowed.at(chunk, logits.device) if allowed is not None else None
                distribution = log_probs(logits, self.temperature, inside)
                logp.append(distribution.gather(-1, taken[chunk, None]).squeeze(-1))
                if want.top_k:
                    top = distribution.topk(min(want.top_k, distribution.shape[-1]), dim=-1)
                    best_ids.append(top.indices)
                    best.append(top.values)
                if want.given:
                    assert ids is not None
                    given.append(distribution.gather(-1, ids[chunk].to(states.device)))
        empty, width = torch.empty(0, want.top_k), ids.shape[-1] if ids is not None else 0
        return Scores(
            logp=torch.cat(logp or [torch.empty(0)]).cpu() if want.sampled else None,
            topk_ids=torch.cat(best_ids or [empty.long()]).cpu() if want.top_k else None,
            topk_logp=torch.cat(best or [empty]).cpu() if want.top_k else None,
            given_logp=torch.cat(given or [torch.empty(0, width)]).cpu() if want.given else None,
            hidden=states.float().cpu() if want.hidden else None,
            mass_outside=torch.cat(outside or [torch.empty(0)]).cpu() if narrowed else None,
        )


def action_positions(request: ScoreRequest) -> Tensor:
    """Return the positions of the actions, int64 [actions]. The state before a position judges the token there."""
    spans = [torch.arange(start, end) for start, end in request.spans]
    return torch.cat(spans or [torch.empty(0, dtype=torch.int64)])
