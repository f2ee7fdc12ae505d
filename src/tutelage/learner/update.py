"""One update from one batch: passes through the model, chunked losses, one division, one optimizer step.

The learner knows neither the algorithm nor the modality. It gets losses that return sums over actions, and a `Cut` that
runs the model over the actions of a batch, one pass at a time. The sums are divided once by the number of actions in
the whole batch, which is known before the first backward pass, so passes, chunks and ranks only split the work. Each
rank gets its own rows; gradients and metrics are those of all ranks, columns those of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tutelage.data.ragged import Ragged, offsets_of
from tutelage.data.trajectory import Batch, Key
from tutelage.learner.ranks import Ranks, alone
from tutelage.losses.contract import Loss


class NonFiniteLoss(RuntimeError):
    """A loss or a gradient is NaN or infinite. `keys` names the rows."""

    def __init__(self, message: str, keys: Sequence[Key]) -> None:
        super().__init__(message)
        self.keys = tuple(keys)

    def __reduce__(self) -> tuple[type[NonFiniteLoss], tuple[str, tuple[Key, ...]]]:
        return type(self), (str(self), self.keys)


class Chunk(NamedTuple):
    """Actions whose losses are computed at once."""

    out: Any
    """the model's outputs: ModelOut or FlowOut"""
    columns: Mapping[str, Tensor]
    """columns of these actions; row-span columns are repeated for each action"""
    seen: Mapping[str, Tensor]
    """[actions]: columns for the record that do not depend on the losses"""


class Pass(Protocol):
    """One forward pass over some of a batch's actions."""

    @property
    def positions(self) -> Tensor:
        """int64 [actions]: positions of its actions within the batch, in the order of the chunks"""

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks. If a chunk is differentiated, this must happen before the next one is requested."""

    def backward(self) -> None:
        """Finish the backward pass down to the weights, after the last chunk."""


class Cut(Protocol):
    """Splits the actions of a batch into passes and runs them: `learner.text.Limits`, `learner.flow.StepLimits`."""

    def split(self, batch: Batch) -> list[list[int]]:
        """Return the parts of the batch, one per pass, as numbers for `run`."""

    def run(self, model: Any, batch: Batch, part: list[int]) -> Pass:
        """Run the forward pass. An empty part also runs the model, to stay in step with other ranks, without gradient
        contributions."""

    def neutral(self) -> Cut:
        """Return the cut for evaluation, which measures the model's own distribution, not that of the rollout."""


@dataclass(slots=True)
class Tally:
    """Per-action values of a whole batch, collected pass by pass."""

    offsets: Tensor
    """the action offsets of the batch"""
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    positions: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch) -> Tally:
        return cls(action_offsets(batch))

    def columns(self) -> dict[str, Ragged]:
        """Return the columns, with rows in the order of the batch."""
        order = torch.cat(self.positions) if self.positions else torch.zeros(0, dtype=torch.int64)
        back = None if bool((order.diff() > 0).all()) else order.argsort()
        joined = {name: torch.cat(chunks) for name, chunks in self.values.items()}
        return {name: Ragged(v if back is None else v[back], self.offsets) for name, v in joined.items()}


def action_offsets(batch: Batch) -> Tensor:
    """Return int64 [rows + 1]: where the actions of each row begin among all actions."""
    mask = batch.columns["mask"]
    return offsets_of(mask.values.to(torch.int64))[mask.offsets]


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    losses: Sequence[Loss],
    cut: Cut,
    clip_norm: float,
    parameters: Sequence[torch.nn.Parameter],
    ranks: Ranks = alone,
) -> tuple[dict[str, float], dict[str, Ragged]]:
    """Run one update. Returns its metrics, and per-action columns for the record."""
    optimizer.zero_grad(set_to_none=False)  # keep the buffers: allocating them again is slow
    columns = accumulate(model, batch, losses, cut, ranks)
    if not any(ranks.all(bool(columns))):
        return {"grad_norm": 0.0}, columns  # no actions: skip the step, so that momentum does not move the weights
    norm = ranks.clip(parameters, clip_norm)
    if not bool(torch.isfinite(norm)):
        raise NonFiniteLoss(f"the gradient norm is {float(norm)}", _joined(ranks.all(batch.keys)))
    optimizer.step()
    return {"grad_norm": float(norm), **summarise(columns, ranks)}, columns


def accumulate(model: Any, batch: Batch, losses: Sequence[Loss], cut: Cut, ranks: Ranks = alone) -> dict[str, Ragged]:
    """Add the gradient of the mean loss over the whole batch to the parameters. Returns the per-action columns."""
    actions = sum(ranks.all(int(batch.columns["mask"].values.sum())))
    if actions == 0:
        return {}
    tally = Tally.of(batch)
    for part in _passes(batch, cut, ranks):
        work = cut.run(model, batch, part)
        finite = True
        for chunk in work.chunks():
            total = _sum(chunk, losses, tally) / actions
            finite = bool(torch.isfinite(total))
            if not finite:
                break
            total.backward()
        if not all(ranks.all(finite)):
            raise NonFiniteLoss("the loss is not finite", _non_finite_keys(model, batch, losses, cut, ranks))
        work.backward()
        tally.positions.append(work.positions)
    return tally.columns()


@torch.no_grad()
def measure(model: Any, batch: Batch, losses: Sequence[Loss], cut: Cut, ranks: Ranks = alone) -> dict[str, Ragged]:
    """Return the per-action columns of the losses, without gradients."""
    tally = Tally.of(batch)
    for part in _passes(batch, cut, ranks):
        work = cut.run(model, batch, part)
        for chunk in work.chunks():
            _sum(chunk, losses, tally)
        tally.positions.append(work.positions)
    ranks.settle(model)
    return tally.columns()


def summarise(columns: Mapping[str, Ragged], ranks: Ranks = alone) -> dict[str, float]:
    """Return the mean of each per-action column over all ranks, with extremes for losses and the sampler gap."""
    gathered = ranks.all({name: _Extent.of(c.values.float()) for name, c in columns.items() if len(c.values)})
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for found in gathered for name in found):
        parts = [found[name] for found in gathered if name in found]
        metrics[name] = sum(part.mean * part.actions for part in parts) / sum(part.actions for part in parts)
        if name.endswith(("loss", "divergence")):
            metrics[f"{name}_min"] = min(part.least for part in parts)
        if name.endswith(("loss", "divergence")) or name == "sampler_gap":
            metrics[f"{name}_max"] = max(part.most for part in parts)
    return metrics


class _Extent(NamedTuple):
    """Statistics of one column on one rank."""

    actions: int
    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Tensor) -> _Extent:
        return cls(len(values), float(values.mean()), float(values.min()), float(values.max()))


def _passes(batch: Batch, cut: Cut, ranks: Ranks) -> list[list[int]]:
    """Return the parts of the passes, padded with empty ones so that all ranks run equally many."""
    parts = cut.split(batch)
    return parts + [[]] * (max(ranks.all(len(parts))) - len(parts))


def _sum(chunk: Chunk, losses: Sequence[Loss], tally: Tally) -> Tensor:
    """Return the weighted sum of all losses over a chunk, and add their columns to the tally.

    A column that an earlier loss has reported is prefixed with the name and number of the later loss.
    """
    total: Tensor | None = None
    mine: dict[str, Tensor] = dict(chunk.seen)
    for number, loss in enumerate(losses):
        result = loss(chunk.out, chunk.columns)
        total = loss.coefficient * result.total if total is None else total + loss.coefficient * result.total
        for name, column in result.per_action.items():
            mine[name if name not in mine else f"{loss.name}/{number}/{name}"] = column
    for name, column in mine.items():
        tally.values.setdefault(name, []).append(column.cpu())
    return torch.zeros(()) if total is None else total


def _non_finite_keys(model: Any, batch: Batch, losses: Sequence[Loss], cut: Cut, ranks: Ranks) -> list[Key]:
    """Return the keys of rows with values that are not finite, on all ranks; all keys if no column shows any."""
    found: set[int] = set()
    for column in measure(model, batch, losses, cut, ranks).values():
        found.update(column.row_ids()[~torch.isfinite(column.values.float())].tolist())
    return _joined(ranks.all([batch.keys[row] for row in sorted(found)])) or _joined(ranks.all(batch.keys))


def _joined(keys: Sequence[Sequence[Key]]) -> list[Key]:
    return [key for part in keys for key in part]
