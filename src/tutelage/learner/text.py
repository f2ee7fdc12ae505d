"""Passes of a language model over text: rows are packed, and logits are computed in chunks.

Logits exist for at most `logit_tokens` actions at once. Each chunk is differentiated down to its hidden states, whose
gradients then go through the model in one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutelage.data.trajectory import Batch
from tutelage.errors import UserError
from tutelage.learner.packing import micro_batches
from tutelage.learner.update import Chunk, action_offsets
from tutelage.losses.contract import ModelOut
from tutelage.models.causal_lm import CausalLM
from tutelage.models.packing import pack
from tutelage.policy.constraints import Allowed, ConstraintError, Masks, allowed_at, from_column


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of passes and chunks, and the settings that define the distribution."""

    micro_batch_tokens: int
    logit_tokens: int
    temperature: float
    """the rollout temperature, so that learner and sampler use the same distribution"""
    vocabulary: int
    """number of ids that student and teachers share"""
    masks: Masks | None = None
    """the ids that constraints allow, for rows that were drawn under some"""

    def split(self, batch: Batch) -> list[list[int]]:
        """Return the row numbers of each pass."""
        return micro_batches(batch.columns["tokens"].lengths.tolist(), self.micro_batch_tokens)

    def run(self, model: CausalLM, batch: Batch, part: list[int]) -> TextPass:
        return TextPass(model, batch, part, self)

    def neutral(self) -> Limits:
        """Return the limits for evaluation, at temperature 1."""
        return replace(self, temperature=1.0)

    def allowed(self, batch: Batch) -> Allowed | None:
        """Return the ids that could be drawn at the actions of a batch; None if no row was drawn under a constraint."""
        given = batch.objects.get("constraints", [])
        if not any(given):
            return None
        assert self.masks is not None, "rows with constraints need masks"
        found: list[bytes | None] = []
        tokens, masks = (batch.columns[name].rows() for name in ("tokens", "mask"))
        for key, ids, mask, spans in zip(batch.keys, tokens, masks, given, strict=True):
            actions = mask.nonzero().squeeze(-1).tolist()
            try:
                found += allowed_at(self.masks, ids.tolist(), from_column(spans), actions)
            except ConstraintError as error:
                raise UserError(f"{key}: its tokens do not follow the constraint of its row: {error}") from error
        return Allowed.of(found, self.vocabulary)


class TextPass:
    """One forward pass over some rows."""

    def __init__(self, model: CausalLM, batch: Batch, rows: list[int], limits: Limits) -> None:
        self.model, self.limits, self.part = model, limits, batch.select(rows)
        self.hidden, self.lengths = _action_states(model, self.part)
        """[actions, width]: hidden states at the actions; int64 [rows]: the number of actions of each row"""
        self.allowed = limits.allowed(self.part) if model.value_head is None else None
        """the ids that could be drawn at the actions, if some of them were constrained"""
        self._gradient = torch.empty_like(self.hidden)
        first = int(action_offsets(batch)[rows[0]]) if rows else 0
        self.positions = torch.arange(first, first + len(self.hidden))

    def chunks(self) -> Iterator[Chunk]:
        device, head = self.hidden.device, self._head
        part, hidden = self.part, self.hidden.detach()
        ids = part.columns["tokens"].values[part.columns["mask"].values]
        columns = {name: c.values for name, c in part.columns.items() if name not in ("tokens", "mask")}
        columns |= {name: values.repeat_interleave(self.lengths, dim=0) for name, values in part.rows.items()}
        for start in range(0, len(ids), self.limits.logit_tokens):
            at = slice(start, start + self.limits.logit_tokens)
            states = hidden[at].requires_grad_(torch.is_grad_enabled())
            inside = self.allowed.at(at, device) if self.allowed is not None else None
            out = ModelOut(states, ids[at].to(device), head, self.limits.temperature, self.model.values, inside)
            yield Chunk(out, {name: values[at].to(device) for name, values in columns.items()}, self._seen(states))
            if states.grad is not None:
                self._gradient[at] = states.grad

    def backward(self) -> None:
        self.hidden.backward(self._gradient)

    @property
    def _head(self) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self.model.head(hidden, self.limits.vocabulary)

    def _seen(self, hidden: Tensor) -> dict[str, Tensor]:
        if self.model.value_head is not None or self.model.head.vocabulary <= self.limits.vocabulary:
            return {}
        return {"mass_outside": self.model.head.mass_outside(hidden.detach(), self.limits.vocabulary)}


def _action_states(model: CausalLM, part: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden states [actions, width] from which actions were sampled, and the number of actions per row.

    Without rows, one masked token goes through the model, with a gradient of zero.
    """
    sequences = part.columns["tokens"].rows() or [torch.zeros(1, dtype=torch.int64)]
    masks = part.columns["mask"].rows() or [torch.zeros(1, dtype=torch.bool)]
    packed = pack(sequences)
    hidden = model.forward_pack(packed)
    before = [row[mask.nonzero().squeeze(-1) - 1] for row, mask in zip(packed.rows, masks, strict=True)]
    lengths = torch.tensor([len(b) for b in before[: len(part)]], dtype=torch.int64)
    return hidden[torch.cat(before).to(hidden.device)], lengths
