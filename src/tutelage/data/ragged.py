"""Ragged batches: flat values plus offsets. The only file of the project that pads.

    rows    [[a b c] [] [d]]
    values   a b c d            shape [total, *trailing]
    offsets  0 3 3 4            int64 [rows + 1]

Nothing is inferred from shapes: equal lengths, length 1, empty rows and empty batches are ordinary, because the
offsets say where rows end and the trailing dims are part of `values`, even when `values` is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different length that share dtype and trailing dims."""

    values: Tensor
    """[total, *trailing]: all rows, one after the other."""
    offsets: Tensor
    """int64 [rows + 1]: row i is values[offsets[i]:offsets[i + 1]]."""

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise ValueError(f"offsets must be int64 [rows + 1], got {self.offsets.dtype} {list(self.offsets.shape)}")
        if self.values.ndim == 0:
            raise ValueError("values need a leading dimension, got a scalar")
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            raise ValueError(
                f"offsets run from {int(self.offsets[0])} to {int(self.offsets[-1])}, "
                f"but there are {len(self.values)} values"
            )
        if bool((self.offsets[1:] < self.offsets[:-1]).any()):
            raise ValueError("offsets decrease: a row would have a negative length")

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], *, dtype: torch.dtype, trailing: tuple[int, ...] = ()) -> Ragged:
        """Join tensors [length, *trailing]; dtype and trailing are given, so that no rows at all is legal."""
        shapes = [row.shape for row in rows]
        for i, shape in enumerate(shapes):
            if shape[1:] != trailing or len(shape) == 0:
                raise ValueError(f"row {i} has shape {list(shape)}, expected [length, {list(trailing)}]")
        lengths = torch.tensor([shape[0] for shape in shapes], dtype=torch.int64)
        same = [row if row.dtype == dtype else row.to(dtype) for row in rows]
        values = torch.cat(same) if rows else torch.empty(0, *trailing, dtype=dtype)
        return cls(values, offsets_of(lengths))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """Take the first lengths[i] entries of each row of [rows, longest, *trailing]."""
        keep = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
        return cls(padded[keep], offsets_of(lengths.to(torch.int64)))

    @classmethod
    def from_nested(cls, nested: Tensor) -> Ragged:
        """From a torch.nested tensor with the jagged layout, ragged in dimension 1. Holes between rows are left out."""
        if nested.layout != torch.jagged or isinstance(nested.shape[1], int):
            raise ValueError(f"expected [rows, ragged, *trailing] with the jagged layout, this one is {nested.layout}")
        nested = nested.contiguous()
        return cls(nested.values(), nested.offsets().to(torch.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [rows]."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def trailing(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def row(self, i: int) -> Tensor:
        """A view of row i; negative i counts from the end."""
        self._check(i)
        i %= len(self)
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def _check(self, i: int) -> None:
        if not -len(self) <= i < len(self):
            raise IndexError(f"there is no row {i}: the batch has {len(self)} rows")

    def rows(self) -> list[Tensor]:
        """A view of every row."""
        return list(torch.split(self.values, self.lengths.tolist())) if len(self) else []

    def select(self, indices: Sequence[int]) -> Ragged:
        """These rows, in this order."""
        for i in indices:
            self._check(i)
        chosen = torch.tensor(indices, dtype=torch.int64) % max(len(self), 1)
        lengths = self.lengths[chosen]
        offsets = offsets_of(lengths)
        shift = torch.repeat_interleave(self.offsets[chosen] - offsets[:-1], lengths)
        return Ragged(self.values[torch.arange(len(shift)) + shift], offsets)

    def map(self, function: Callable[[Tensor], Tensor]) -> Ragged:
        """Apply a function that keeps the leading dimension to the flat values."""
        return Ragged(function(self.values), self.offsets)

    def row_ids(self) -> Tensor:
        """int64 [total]: the row of each value."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def to_padded(self, fill: float) -> Tensor:
        """[rows, longest, *trailing], padded on the right with `fill`."""
        longest = int(self.lengths.max()) if len(self) else 0
        padded = self.values.new_full((len(self), longest, *self.trailing), fill)
        padded[torch.arange(longest)[None, :] < self.lengths[:, None]] = self.values
        return padded

    def to_nested(self) -> Tensor:
        """A torch.nested tensor with the jagged layout."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)


def offsets_of(lengths: Tensor) -> Tensor:
    """int64 [rows + 1] from int64 [rows]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all parts, in order; there must be at least one part, to know dtype and trailing dims."""
    for i, part in enumerate(parts):
        if (part.values.dtype, part.trailing) != (parts[0].values.dtype, parts[0].trailing):
            raise ValueError(
                f"part {i} has {part.values.dtype} and trailing dims {list(part.trailing)}, "
                f"part 0 has {parts[0].values.dtype} and {list(parts[0].trailing)}"
            )
    values = torch.cat([part.values for part in parts])
    return Ragged(values, offsets_of(torch.cat([part.lengths for part in parts])))
