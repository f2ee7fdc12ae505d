"""Writes and reads the files of a run directory: whole files, replaced atomically, and JSON lines, appended durably."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tutelage.data import durable
from tutelage.errors import UserError

RESUME = "resume the run"


def write_atomic(path: Path, content: str | bytes, then: str = RESUME) -> None:
    """Replace the file at `path`, or leave it as it is if that fails. Durable when it returns. `then` is what an error
    advises to do once the disk can be written again."""
    try:
        durable.replace(path, content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    except OSError as error:
        raise unwritable(path, error, then) from error


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON line, durably. If the disk is full, a line that was written in part is removed again."""
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    try:
        with path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                durable.write_all(file.fileno(), line)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        raise unwritable(path, error) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one per line; [] if there is no file. A last line that a killed run left
    incomplete is skipped; a broken line anywhere else is an error, because a killed run does not cause it."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UserError(
                f'{path}, line {number}: expected a JSON object with an integer "step", got {line[:60]!r}. '
                "The file was changed by something else; remove or repair that line."
            )
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these JSON lines, atomically."""
    write_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def finite_or_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def none_to_nan(value: float | None) -> float:
    """Return NaN for None: the inverse of `finite_or_none`, except that infinity becomes NaN too."""
    return math.nan if value is None else value


def remove_directory_quietly(path: Path) -> None:
    """Remove a directory if it exists and is empty."""
    try:
        path.rmdir()
    except (OSError, ValueError):
        return


def unwritable(path: Path, error: OSError, then: str = RESUME) -> UserError:
    """Return the error for a disk that is full or read-only."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}. Nothing half written was left behind. "
        f"Free some space or make the directory writable, then {then}."
    )


def no_place_for_a_run(directory: Path, error: OSError | ValueError) -> UserError:
    """Return the error for a run that cannot be started because its directory cannot be written."""
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return UserError(
        f"{directory}: a run cannot be written there: {reason}. Choose another `out`, or make the directory writable."
    )
