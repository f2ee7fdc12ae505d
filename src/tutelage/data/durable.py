"""Durable writes: a file or a directory is whole or not there, also after a kill or a power cut.

Everything that a run must find again is written with these: checkpoints, the run directory, exports, caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write one file, piece by piece, and flush it. Its name is durable once the directory is synced too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for piece in pieces:
            write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, piece: bytes | memoryview) -> None:
    """Write a piece to an open file; the system may take it in several parts."""
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def make_directory(path: Path) -> None:
    """Create a directory and those above it, unless it is there."""
    if not path.is_dir():
        path.mkdir(parents=True)
        sync(path.parent)


def temporary_of(path: Path) -> Path:
    """Where the content of a file is gathered before it takes its place."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def replacing(path: Path, temporary: Path | None = None, *, flush: bool = True) -> Iterator[Path]:
    """Replace a file: the block writes to the path that it is given, and what it wrote takes the place of `path` at the
    end. An error leaves what was there before.

    `temporary` is that path, beside the file; processes that may replace one file at the same time need one each.
    Without `flush`, a power cut may leave a damaged file, though a kill does not: only for content that carries a
    checksum and can be computed again.
    """
    temporary = temporary or temporary_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if flush:
            sync(temporary)
        os.replace(temporary, path)
        if flush:
            sync(path.parent)
    except Exception:
        remove_quietly(temporary)
        raise


def replace(path: Path, content: bytes) -> None:
    """Put the whole content at `path`, or leave what was there."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def remove_quietly(path: Path) -> None:
    """Remove a leftover if it is there; failing to is no reason to hide the error that led here."""
    try:
        path.unlink(missing_ok=True)
    except (OSError, ValueError):
        return
