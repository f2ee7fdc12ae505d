"""Check rows against the declared columns, and join rows to a batch. All back ends of the queue share this module.

A row is described where it is written: each column by its span, its sizes and its own mistakes. The description is
checked where the ledger is, which may be another process that never sees the tensors. So the writer of a row gets the
error, not the learner some minutes later, and all mistakes are reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import COLUMNS, Batch, Column, Key, Span
from tutelage.queue.contract import SchemaError

Lengths = dict[Span, int]
"""The number of values of a row per span: tokens, actions and, once it has a step column, steps."""
Trailing = tuple[int, ...]
"""The dims of a column after the span's dim; all dims of a row-span column."""


class ColumnForm(NamedTuple):
    """One column of one row, without its values."""

    span: Span
    length: int
    trailing: Trailing
    problem: str | None
    """what is wrong with dtype or dims; if set, the other fields have no meaning"""


class Described(NamedTuple):
    """Columns to store, without their values."""

    columns: dict[str, ColumnForm]
    missing: tuple[str, ...]
    """required columns that are not among them"""
    actions: int | None
    """number of true values of the mask; None without a valid mask"""
    oldest: int | None
    """lowest weight version of an action; None without actions"""


def describe(columns: Mapping[str, Any]) -> Described:
    """Describe columns for the ledger."""
    forms = {name: _describe_column(name, value) for name, value in columns.items()}
    mask, version = (columns[name] if _sound(forms, name) else None for name in ("mask", "version"))
    return Described(
        forms,
        _missing(columns),
        None if mask is None else int(mask.count_nonzero()),
        None if version is None else min(version.tolist(), default=None),
    )


def _missing(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the missing columns: those that are required, and tokens if there are no denoising steps either."""
    names = [name for name, column in COLUMNS.items() if not column.optional and name not in columns]
    return tuple(names if "tokens" in columns or "sigmas" in columns else ["tokens", *names])


def check_row(key: Key, row: Described) -> Lengths:
    """Check a whole row when it is put. Returns its lengths, which columns added later must match."""
    mistakes = [f"{name}: missing, and every row needs it" for name in row.missing]
    lengths: Lengths = {}
    if (name := "tokens" if "tokens" in row.columns else "sigmas") and _sound(row.columns, name):
        lengths["sequence"] = row.columns[name].length
    if row.actions is not None and lengths.get("sequence", row.columns["mask"].length) == row.columns["mask"].length:
        lengths["action"] = row.actions
    lengths, more = _check(row.columns, lengths)
    _raise(key, mistakes + more)
    return lengths


def check_update(key: Key, added: Described, lengths: Lengths) -> Lengths:
    """Check columns that are added to a row with these lengths. Returns the updated lengths."""
    lengths, mistakes = _check(added.columns, lengths)
    _raise(key, mistakes)
    return lengths


def check_names(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names without duplicates, in order of declaration. Raises SchemaError if one is not declared."""
    asked = set(names)
    unknown = [f"{name}: {_undeclared(name)}" for name in sorted(asked - COLUMNS.keys())]
    if unknown:
        raise SchemaError(f"{where}: {'; '.join(unknown)}")
    return tuple(name for name in COLUMNS if name in asked)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the declared columns among these names, in order of declaration."""
    known = set(names)
    return tuple(name for name in COLUMNS if name in known)


def check_even(rows: Mapping[Key, Mapping[str, Trailing]], names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that the rows have; all of them if there are no rows.

    A column that no row has is left out. Raises SchemaError if only some rows have a column, or if its open trailing
    dims differ between rows.
    """
    present: list[str] = []
    mistakes: list[str] = []
    for name in names:
        values = {key: row[name] for key, row in rows.items() if name in row}
        if rows and not values:
            continue
        if problem := _uneven(rows, values):
            mistakes.append(f"{name}: {problem}")
        present.append(name)
    if mistakes:
        raise SchemaError(f"get: {'; '.join(mistakes)}")
    return tuple(present)


def join(rows: Mapping[Key, Mapping[str, Any]], names: Iterable[str]) -> Batch:
    """Join rows, which must all have these columns, to a batch. Without rows, every column is empty."""
    columns: dict[str, Ragged] = {}
    single: dict[str, Tensor] = {}
    objects: dict[str, list[Any]] = {}
    for name in names:
        column, parts = COLUMNS[name], [row[name] for row in rows.values()]
        if column.dtype is None:
            objects[name] = parts
            continue
        empty = torch.empty(0, *(dim or 0 for dim in column.trailing or ()), dtype=column.dtype)  # open dims are 0
        if column.span == "row":
            single[name] = torch.stack(parts) if parts else empty
        else:
            trailing = tuple((parts[0] if parts else empty).shape[1:])
            columns[name] = Ragged.from_rows(parts, dtype=column.dtype, trailing=trailing)
    return Batch(tuple(rows), columns, single, objects)


def _describe_column(name: str, value: Any) -> ColumnForm:
    column = COLUMNS.get(name)
    if column is None:
        return ColumnForm("row", 0, (), _undeclared(name))
    if column.dtype is None:
        return ColumnForm("row", 1, (), _json_problem(value))
    if not isinstance(value, Tensor):
        return ColumnForm("row", 0, (), f"is a {type(value).__name__}, expected a {column.dtype} tensor")
    return _form(name, value.dtype, value.shape)


@lru_cache(maxsize=4096)
def _form(name: str, dtype: torch.dtype, size: torch.Size) -> ColumnForm:
    """Return the form of a tensor. It is cached, as the rows of a run have few different sizes."""
    column, shape = COLUMNS[name], tuple(size)
    if (problem := _problem(column, dtype, shape)) is not None:
        return ColumnForm("row", 0, (), problem)
    return (
        ColumnForm("row", 1, shape, None)
        if column.span == "row"
        else ColumnForm(column.span, shape[0], shape[1:], None)
    )


def _sound(forms: Mapping[str, ColumnForm], name: str) -> bool:
    """Whether the column is present, with the right dtype and dims."""
    return name in forms and forms[name].problem is None


def _check(columns: Mapping[str, ColumnForm], known: Lengths) -> tuple[Lengths, list[str]]:
    """Return the lengths and the mistakes of the columns. The first step column sets the number of steps."""
    lengths = dict(known)
    mistakes: list[str] = []
    for name, form in columns.items():
        problem = form.problem
        if problem is None and form.span not in ("row", "group"):
            if form.span == "step":
                lengths.setdefault("step", form.length)
            problem = _fits(form, lengths)
        if problem is not None:
            mistakes.append(f"{name}: {problem}")
    return lengths, mistakes


def _problem(column: Column, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Return what is wrong with dtype and dims, apart from the length of the span."""
    if dtype != column.dtype:
        return f"dtype is {dtype}, expected {column.dtype}"
    lead = column.span != "row"
    wanted = column.trailing
    if wanted is None:
        return None if len(shape) >= lead else f"shape is {list(shape)}, expected [{column.span}, …]"
    wrong = any(want not in (None, size) for want, size in zip(wanted, shape[lead:], strict=False))
    if len(shape) == lead + len(wanted) and not wrong:
        return None
    dims = (*([column.span] if lead else []), *("any" if dim is None else str(dim) for dim in wanted))
    expected = f"expected [{', '.join(dims)}]"
    if len(shape) != len(dims):
        return f"shape is {list(shape)} ({len(shape)} dims), {expected} ({len(dims)} dims)"
    return f"shape is {list(shape)}, {expected}"


def _json_problem(value: Any) -> str | None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"is a {type(value).__name__}, expected a value that JSON can hold: {error}"
    return None


def _fits(form: ColumnForm, lengths: Lengths) -> str | None:
    """Return what is wrong with the length of the span. Unknown lengths are not checked."""
    length = lengths.get(form.span, form.length)
    if form.length == length:
        return None
    meaning = {"sequence": "tokens", "action": "actions (true values of mask)", "step": "steps"}[form.span]
    return f"has {form.length} values, but the row has {length} {meaning}"


def _undeclared(name: str) -> str:
    close = get_close_matches(name, COLUMNS, n=1)
    hint = f"did you mean {close[0]}?" if close else "declare it with tutelage.data.trajectory.declare"
    return f"is not a declared column; {hint}"


def _raise(key: Key, mistakes: Sequence[str]) -> None:
    if mistakes:
        raise SchemaError(f"{key}: {'; '.join(mistakes)}")


def _uneven(rows: Mapping[Key, object], trailing: Mapping[Key, Trailing]) -> str | None:
    """Return why the values of a column cannot be joined."""
    if len(trailing) < len(rows):
        lacking = next(key for key in rows if key not in trailing)
        return f"{len(trailing)} of {len(rows)} rows have it, {lacking} lacks it"
    first = next(iter(trailing), None)
    odd = next((key for key in trailing if first is not None and trailing[key] != trailing[first]), None)
    if first is None or odd is None:
        return None
    return f"trailing dims differ: {list(trailing[first])} in {first}, {list(trailing[odd])} in {odd}"
