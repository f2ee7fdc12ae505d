"""One update from one batch: packed forward, chunked losses, one division, one optimizer step.

The learner does not know which algorithm runs: it is given losses that return sums over actions, and divides them once
by the number of actions in the whole batch, known before the first backward pass. So micro-batches, chunks and ranks
only split the work. Each rank is given its own rows; gradients and metrics are those of all ranks, columns its own.

Logits exist for `logit_tokens` actions at a time: each chunk is differentiated down to its hidden states at once, and
the hidden states' gradients then go through the model in one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from understudy.data.ragged import Ragged, offsets_of
from understudy.data.trajectory import Batch, Key
from understudy.learner.packing import micro_batches
from understudy.learner.ranks import Ranks, alone
from understudy.losses.contract import Loss, ModelOut
from understudy.models.causal_lm import CausalLM
from understudy.models.packing import pack


class NonFiniteLoss(RuntimeError):
    """A loss or a gradient is NaN or infinite; names the rows."""

    def __init__(self, message: str, keys: Sequence[Key]) -> None:
        super().__init__(message)
        self.keys = tuple(keys)

    def __reduce__(self) -> tuple[type[NonFiniteLoss], tuple[str, tuple[Key, ...]]]:
        return type(self), (str(self), self.keys)


@dataclass(frozen=True, slots=True)
class Limits:
    """How the work is cut."""

    micro_batch_tokens: int
    logit_tokens: int
    temperature: float
    """the rollout's, so that learner and sampler mean the same distribution"""
    vocabulary: int
    """ids that student and teachers share"""


@dataclass(slots=True)
class Tally:
    """Per-action values of a whole batch, gathered micro-batch by micro-batch, rows in order."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    lengths: list[Tensor] = field(default_factory=list)

    def add(self, values: Mapping[str, list[Tensor]], lengths: Tensor) -> None:
        """Values of a micro-batch; one without actions has no values, but its rows count."""
        for name, chunks in values.items():
            self.values.setdefault(name, []).extend(chunks)
        self.lengths.append(lengths)

    def columns(self) -> dict[str, Ragged]:
        """Row i of every column belongs to row i of the batch."""
        offsets = offsets_of(torch.cat(self.lengths)) if self.lengths else torch.zeros(1, dtype=torch.int64)
        return {name: Ragged(torch.cat(chunks), offsets) for name, chunks in self.values.items()}


def update(
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    losses: Sequence[Loss],
    limits: Limits,
    clip_norm: float,
    parameters: Sequence[torch.nn.Parameter],
    ranks: Ranks = alone,
) -> tuple[dict[str, float], dict[str, Ragged]]:
    """Metrics of the update, and per-action columns for the record."""
    optimizer.zero_grad(set_to_none=False)  # the buffers stay: giving them back would only fault them in again
    columns = accumulate(model, batch, losses, limits, ranks)
    if not any(ranks.all(bool(columns))):
        return {"grad_norm": 0.0}, columns  # nobody acted: nothing to learn from, and no momentum to follow either
    norm = ranks.clip(parameters, clip_norm)
    if not bool(torch.isfinite(norm)):
        raise NonFiniteLoss(f"the gradient norm is {float(norm)}", _joined(ranks.all(batch.keys)))
    optimizer.step()
    return {"grad_norm": float(norm), **summarise(columns, ranks)}, columns


def accumulate(
    model: CausalLM, batch: Batch, losses: Sequence[Loss], limits: Limits, ranks: Ranks = alone
) -> dict[str, Ragged]:
    """Add the gradient of the whole batch's mean loss to the parameters."""
    actions = sum(ranks.all(int(batch.columns["mask"].values.sum())))
    if actions == 0:
        return {}
    tally = Tally()
    for rows in _splits(batch, limits, ranks):
        part = batch.select(rows)
        hidden, lengths = _action_states(model, part)
        gradient = torch.empty_like(hidden)
        values: dict[str, list[Tensor]] = {}
        finite = True
        for at, chunk in _chunks(part, lengths, hidden.detach(), limits.logit_tokens):
            chunk.hidden.requires_grad_()
            total = _sum(model, chunk, losses, limits, values) / actions
            finite = bool(torch.isfinite(total))
            if not finite:
                break
            total.backward()
            assert chunk.hidden.grad is not None
            gradient[at] = chunk.hidden.grad
        if not all(ranks.all(finite)):
            raise NonFiniteLoss("the loss is not finite", _guilty(model, batch, losses, limits, ranks))
        hidden.backward(gradient)
        tally.add(values, lengths)
    return tally.columns()


@torch.no_grad()
def measure(
    model: CausalLM, batch: Batch, losses: Sequence[Loss], limits: Limits, ranks: Ranks = alone
) -> dict[str, Ragged]:
    """The per-action columns of the losses, without a gradient."""
    tally = Tally()
    for rows in _splits(batch, limits, ranks):
        part = batch.select(rows)
        hidden, lengths = _action_states(model, part)
        values: dict[str, list[Tensor]] = {}
        for _, chunk in _chunks(part, lengths, hidden, limits.logit_tokens):
            _sum(model, chunk, losses, limits, values)
        tally.add(values, lengths)
    ranks.settle(model)
    return tally.columns()


def summarise(columns: Mapping[str, Ragged], ranks: Ranks = alone) -> dict[str, float]:
    """Mean of each per-action column over all ranks; of losses and the sampler gap the extremes too."""
    everyone = ranks.all({name: _Extent.of(c.values.float()) for name, c in columns.items() if len(c.values)})
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for found in everyone for name in found):
        parts = [found[name] for found in everyone if name in found]
        metrics[name] = sum(part.mean * part.actions for part in parts) / sum(part.actions for part in parts)
        if name.endswith(("loss", "divergence")):
            metrics[f"{name}_min"] = min(part.least for part in parts)
        if name.endswith(("loss", "divergence")) or name == "sampler_gap":
            metrics[f"{name}_max"] = max(part.most for part in parts)
    return metrics


class _Extent(NamedTuple):
    """Values of one column on one rank."""

    actions: int
    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Tensor) -> _Extent:
        return cls(len(values), float(values.mean()), float(values.min()), float(values.max()))


@dataclass(slots=True)
class _Chunk:
    hidden: Tensor
    ids: Tensor
    columns: dict[str, Tensor]


def _splits(batch: Batch, limits: Limits, ranks: Ranks) -> list[list[int]]:
    """Rows of each pass. Ranks pass through the model together: one that has no rows left goes along with none."""
    splits = micro_batches(batch.columns["tokens"].lengths.tolist(), limits.micro_batch_tokens)
    return splits + [[]] * (max(ranks.all(len(splits))) - len(splits))


def _action_states(model: CausalLM, part: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states [actions, width] that chose the actions of these rows, and the number of actions of each row.

    Without rows, one token that nobody chose goes through the model, so that its gradient is zero.
    """
    sequences = part.columns["tokens"].rows() or [torch.zeros(1, dtype=torch.int64)]
    masks = part.columns["mask"].rows() or [torch.zeros(1, dtype=torch.bool)]
    packed = pack(sequences)
    hidden = model.forward_pack(packed)
    before = [row[mask.nonzero().squeeze(-1) - 1] for row, mask in zip(packed.rows, masks, strict=True)]
    lengths = torch.tensor([len(b) for b in before[: len(part)]], dtype=torch.int64)
    return hidden[torch.cat(before)], lengths


def _chunks(part: Batch, lengths: Tensor, hidden: Tensor, size: int) -> Iterator[tuple[slice, _Chunk]]:
    ids = part.columns["tokens"].values[part.columns["mask"].values]
    columns = {name: c.values for name, c in part.columns.items() if name not in ("tokens", "mask")}
    columns |= {name: values.repeat_interleave(lengths, dim=0) for name, values in part.rows.items()}
    for start in range(0, len(ids), size):
        at = slice(start, start + size)
        yield at, _Chunk(hidden[at], ids[at], {name: values[at] for name, values in columns.items()})


def _sum(
    model: CausalLM, chunk: _Chunk, losses: Sequence[Loss], limits: Limits, values: dict[str, list[Tensor]]
) -> Tensor:
    """The weighted sum of all losses over a chunk. A column that an earlier loss reported too gets the later one's name
    before its own."""
    head: Callable[[Tensor], Tensor] = lambda hidden: model.head(hidden, limits.vocabulary)  # noqa: E731
    out = ModelOut(chunk.hidden, chunk.ids, head, limits.temperature, model.values)
    total = torch.zeros((), dtype=chunk.hidden.dtype)
    mine: dict[str, Tensor] = {}
    if model.value_head is None and model.head.vocabulary > limits.vocabulary:
        mine["mass_outside"] = model.head.mass_outside(chunk.hidden.detach(), limits.vocabulary)
    for number, loss in enumerate(losses):
        result = loss(out, chunk.columns)
        total = total + loss.coefficient * result.total
        for name, column in result.per_action.items():
            mine[name if name not in mine else f"{loss.name}/{number}/{name}"] = column
    for name, column in mine.items():
        values.setdefault(name, []).append(column)
    return total


def _guilty(model: CausalLM, batch: Batch, losses: Sequence[Loss], limits: Limits, ranks: Ranks) -> list[Key]:
    """The rows of all ranks whose values are not finite, wherever the work was cut; all rows if no column tells."""
    found: set[int] = set()
    for column in measure(model, batch, losses, limits, ranks).values():
        found.update(column.row_ids()[~torch.isfinite(column.values.float())].tolist())
    return _joined(ranks.all([batch.keys[row] for row in sorted(found)])) or _joined(ranks.all(batch.keys))


def _joined(keys: Sequence[Sequence[Key]]) -> list[Key]:
    return [key for part in keys for key in part]
