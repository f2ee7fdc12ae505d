"""Rows against the declared columns, and rows joined to a batch: what every back end of the queue does alike.

A row is checked when it enters, so that whoever wrote it gets the error, not the learner some minutes later. All that
is wrong with a row is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from understudy.data.ragged import Ragged
from understudy.data.trajectory import COLUMNS, Batch, Column, Key, Span
from understudy.queue.contract import SchemaError

Lengths = dict[Span, int]
"""How many values a row has per span: tokens, actions and, once a step column is there, steps."""


def check_row(key: Key, columns: Mapping[str, Tensor]) -> Lengths:
    """Check a whole row, as it is put; returns its lengths, against which later columns are checked."""
    missing = [name for name, column in COLUMNS.items() if not column.optional and name not in columns]
    mistakes = [f"{name}: missing, and every row needs it" for name in missing]
    lengths: Lengths = {}
    if (tokens := _sound(columns, "tokens")) is not None:
        lengths["sequence"] = len(tokens)
    mask = _sound(columns, "mask")
    if mask is not None and lengths.get("sequence", len(mask)) == len(mask):
        lengths["action"] = int(mask.sum())
    lengths, more = _check(columns, lengths)
    _raise(key, mistakes + more)
    return lengths


def check_update(key: Key, columns: Mapping[str, Tensor], lengths: Lengths) -> Lengths:
    """Check columns that are added to a row of these lengths; returns its lengths with them."""
    lengths, mistakes = _check(columns, lengths)
    _raise(key, mistakes)
    return lengths


def check_names(names: Iterable[str], where: str) -> tuple[str, ...]:
    """The names without repetition, in order of declaration; SchemaError if one is not declared."""
    asked = set(names)
    unknown = [f"{name}: {_undeclared(name)}" for name in sorted(asked - COLUMNS.keys())]
    if unknown:
        raise SchemaError(f"{where}: {'; '.join(unknown)}")
    return tuple(name for name in COLUMNS if name in asked)


def join(rows: Mapping[Key, Mapping[str, Tensor]], names: Iterable[str]) -> Batch:
    """The batch of these rows, in their order. A column that no row has is left out; one that only some rows have, or
    whose open trailing dims differ between rows, is an error. Without rows every column is there, empty."""
    columns: dict[str, Ragged] = {}
    single: dict[str, Tensor] = {}
    mistakes: list[str] = []
    for name in check_names(names, "get"):
        column = COLUMNS[name]
        values = {key: row[name] for key, row in rows.items() if name in row}
        if rows and not values:
            continue
        if problem := _uneven(column, rows, values):
            mistakes.append(f"{name}: {problem}")
            continue
        parts, empty = list(values.values()), _nothing(column)
        if column.span == "row":
            single[name] = torch.stack(parts) if parts else empty
        else:
            trailing = tuple((parts[0] if parts else empty).shape[1:])
            columns[name] = Ragged.from_rows(parts, dtype=column.dtype, trailing=trailing)
    if mistakes:
        raise SchemaError(f"get: {'; '.join(mistakes)}")
    return Batch(tuple(rows), columns, single)


def _sound(columns: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The column, if it is there and its own dtype and dims are right."""
    value = columns.get(name)
    return value if value is not None and _form(COLUMNS[name], value) is None else None


def _check(columns: Mapping[str, Tensor], known: Lengths) -> tuple[Lengths, list[str]]:
    """Mistakes of each column, by itself and against the lengths; the first step column sets the number of steps."""
    lengths = dict(known)
    mistakes: list[str] = []
    for name, value in columns.items():
        column = COLUMNS.get(name)
        problem = _undeclared(name) if column is None else _form(column, value)
        if column is not None and problem is None and column.span != "row":
            if column.span == "step":
                lengths.setdefault("step", len(value))
            problem = _fits(column, value, lengths)
        if problem is not None:
            mistakes.append(f"{name}: {problem}")
    return lengths, mistakes


def _form(column: Column, value: Tensor) -> str | None:
    """What is wrong with dtype and dims, apart from the span's length."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, expected a {column.dtype} tensor"
    dims = (*([] if column.span == "row" else [column.span]), *column.trailing)
    shape = f"[{', '.join('any' if dim is None else str(dim) for dim in dims)}]"
    if value.dtype != column.dtype:
        return f"dtype is {value.dtype}, expected {column.dtype}"
    if value.ndim != len(dims):
        return f"shape is {list(value.shape)} ({value.ndim} dims), expected {shape} ({len(dims)} dims)"
    sizes = value.shape[len(dims) - len(column.trailing) :]
    if any(want not in (None, size) for want, size in zip(column.trailing, sizes, strict=True)):
        return f"shape is {list(value.shape)}, expected {shape}"
    return None


def _fits(column: Column, value: Tensor, lengths: Lengths) -> str | None:
    """What is wrong with the span's length; lengths that could not be established are not judged."""
    length = lengths.get(column.span, len(value))
    if len(value) == length:
        return None
    meaning = {"sequence": "tokens", "action": "actions (true values of mask)", "step": "steps"}[column.span]
    return f"has {len(value)} values, but the row has {length} {meaning}"


def _undeclared(name: str) -> str:
    close = get_close_matches(name, COLUMNS, n=1)
    hint = f"did you mean {close[0]}?" if close else "declare it with understudy.data.trajectory.declare"
    return f"is not a declared column; {hint}"


def _raise(key: Key, mistakes: Sequence[str]) -> None:
    if mistakes:
        raise SchemaError(f"{key}: {'; '.join(mistakes)}")


def _uneven(column: Column, rows: Mapping[Key, object], values: Mapping[Key, Tensor]) -> str | None:
    """What keeps the values of a column from being joined."""
    if len(values) < len(rows):
        lacking = [key for key in rows if key not in values]
        return f"{len(values)} of {len(rows)} rows have it, {lacking[0]} lacks it"
    trailing = {key: list(value.shape[0 if column.span == "row" else 1 :]) for key, value in values.items()}
    first = next(iter(trailing), None)
    odd = next((key for key in trailing if first is not None and trailing[key] != trailing[first]), None)
    if first is None or odd is None:
        return None
    return f"trailing dims differ: {trailing[first]} in {first}, {trailing[odd]} in {odd}"


def _nothing(column: Column) -> Tensor:
    """A column of no rows: trailing dims that are open are 0."""
    return torch.empty(0, *(dim or 0 for dim in column.trailing), dtype=column.dtype)
