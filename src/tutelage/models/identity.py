"""Identify a model by its content: a hash that changes whenever its weights or its configuration change."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from contextlib import suppress
from pathlib import Path

from tutelage.data import durable
from tutelage.models.sources import cache_directory

PIECE = 1 << 22
"""Bytes that are read at a time."""
SETTLED = 2 * 10**9
"""Nanoseconds that a file must have been left alone for its hash to be remembered: two changes within the resolution
of the file system's clock look like one."""

Marks = dict[str, list[int]]
"""Size, time of modification, time of change and inode of each file, by name."""


def weights_identity(directory: Path) -> str:
    """Return a hash of the weights and the configuration in a model's directory.

    All bytes are read, once: the hash is kept in the cache directory and used again as long as no file has another
    size, time or inode.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors"))
    marks = _marks(files)
    place = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    kept = cache_directory() / "identities" / f"{place}.json"
    if (known := _remembered(kept, marks)) is not None:
        return known
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{marks[file.name][0]}\0".encode())
        _read_into(digest, file)
    found = digest.hexdigest()
    newest = max((max(mark[1], mark[2]) for mark in marks.values()), default=0)
    if _marks(files) == marks and time.time_ns() - newest > SETTLED:
        _remember(kept, marks, found)
    return found


def _marks(files: list[Path]) -> Marks:
    found = {file.name: file.stat() for file in files}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in found.items()}


def _read_into(digest: hashlib._Hash, file: Path) -> None:
    piece = memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(piece):
            digest.update(piece[:count])


def _remembered(file: Path, marks: Marks) -> str | None:
    """Return the hash that was kept for these files; None if they have changed, or nothing readable was kept."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return str(kept["sha256"]) if kept["files"] == marks else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(file: Path, marks: Marks, found: str) -> None:
    """Keep a hash; a cache that cannot be written only means that the files are read again next time."""
    content = json.dumps({"files": marks, "sha256": found})
    with suppress(OSError), durable.replacing(file, file.with_name(f".{uuid.uuid4().hex}.tmp")) as temporary:
        temporary.write_text(content, encoding="utf-8")
