"""Keep teacher scores on disk and find them by their content.

An entry is named by a hash of everything that its scores depend on: the teacher (weights, dtype, temperature, shared
vocabulary), the tokens, the action positions and what was asked for. The run and the episode are not part of it, so
runs share entries, and a run that was killed asks only for what is missing.

    ab/abcdef….scores    checksum (32 bytes) | safetensors: the scores of the action positions

Entries are replaced atomically and read without locks. One that does not match its checksum is computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from tutelage.data import durable
from tutelage.engines.contract import AnyScoreRequest, ScoreRequest, Scores
from tutelage.policy.constraints import as_column
from tutelage.teachers.pool import Scorer

FORMAT = 1
"""Part of every name. Increase it when entries, or the meaning of scores, change."""
CHECKSUM = 32
"""Bytes of the checksum at the start of an entry."""
MEASURED = 20
"""A process measures the directory each time that it has written one part in this many of the limit."""
FILLED = 0.9
"""The share of the limit that stays when old entries are removed."""


@dataclass(slots=True)
class CacheCounts:
    """What a cache has done."""

    hits: int = 0
    misses: int = 0
    """scores that were not there and were computed"""
    corrupt: int = 0
    """entries that were damaged and computed again; they count as misses too"""
    failures: int = 0
    """scores that could not be stored"""
    evicted: int = 0
    """files that were removed to stay below the limit"""
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    """time spent on reading and writing"""
    reason: str = ""
    """why scores could not be stored, the last time"""

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return self._with(other, 1)

    def __sub__(self, earlier: CacheCounts) -> CacheCounts:
        """What was done since."""
        return replace(self._with(earlier, -1), reason=self.reason if self.failures > earlier.failures else "")

    def _with(self, other: CacheCounts, sign: int) -> CacheCounts:
        counted = [field.name for field in fields(self) if field.name != "reason"]
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in counted}
        return CacheCounts(**sums, reason=other.reason or self.reason)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step."""
        return {
            "cache_hit_share": self.hits / max(self.hits + self.misses, 1),
            "cache_hits": float(self.hits),
            "cache_misses": float(self.misses),
            "cache_corrupt": float(self.corrupt),
            "cache_failures": float(self.failures),
            "cache_bytes_read": float(self.bytes_read),
            "cache_bytes_written": float(self.bytes_written),
            "seconds/cache": self.seconds,
        }


class ScoreCache:
    """Scores in a directory of at most `limit` bytes, which any number of processes use at the same time.

    The entries that were not used for the longest time are removed first. Every process measures the directory each
    time that it has written a twentieth of the limit, so several of them may exceed it by that much each.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self.counts = CacheCounts()
        self._size: int | None = None
        """bytes in the directory when it was last measured, and what this process has written since"""
        self._written = 0
        """bytes since the directory was measured"""

    def get(self, name: str) -> Scores | None:
        """Return the scores of that name; None, and counted, if they are not there or damaged."""
        started = time.perf_counter()
        path = self._path(name)
        found: Scores | None = None
        try:
            content = path.read_bytes()
            found = _decode(name, content)
            self.counts.corrupt += found is None
            self.counts.bytes_read += len(content)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            self.counts.corrupt += 1
        if found is None:
            self.counts.misses += 1
        else:
            self.counts.hits += 1
            with suppress(OSError):  # a cache that cannot be written can still be read
                os.utime(path)
        self.counts.seconds += time.perf_counter() - started
        return found

    def put(self, name: str, scores: Scores) -> None:
        """Store scores. What cannot be stored is counted, with the reason; the scores are still good."""
        started = time.perf_counter()
        try:
            content = _encode(name, scores)
            if len(content) > self.limit:
                raise OSError(f"scores of {len(content):,} bytes are above the limit of {self.limit:,}")
            path = self._path(name)
            beside = path.with_name(f".{uuid.uuid4().hex}.tmp")
            with durable.replacing(path, beside, flush=False) as temporary:
                temporary.write_bytes(content)
            self.counts.bytes_written += len(content)
            self._make_room(len(content))
        except OSError as error:
            self.counts.failures += 1
            self.counts.reason = str(error)
        self.counts.seconds += time.perf_counter() - started

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / f"{name}.scores"

    def _make_room(self, written: int) -> None:
        """Remove the oldest entries if the directory has become too large."""
        self._written += written
        if self._size is not None:
            self._size += written
            if self._size <= self.limit and self._written * MEASURED < self.limit:
                return
        files = sorted(_files(self.directory))
        self._size, self._written = sum(size for _, size, _ in files), 0
        if self._size <= self.limit:
            return
        for _, size, path in files:
            if self._size <= self.limit * FILLED:
                break
            with suppress(FileNotFoundError):  # another process was faster
                path.unlink()
                self.counts.evicted += 1
            self._size -= size


def _files(directory: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of last use, size and path of every file, with what killed processes have left half-written."""
    for place, _, names in os.walk(directory):
        for name in names:
            path = Path(place, name)
            with suppress(FileNotFoundError):
                found = path.stat()
                yield found.st_mtime_ns, found.st_size, path


def _encode(name: str, scores: Scores) -> bytes:
    tensors = {field.name: getattr(scores, field.name) for field in fields(scores)}
    body = save({key: tensor.contiguous() for key, tensor in tensors.items() if tensor is not None})
    return _checksum(name, body) + body


def _decode(name: str, content: bytes) -> Scores | None:
    """Return the scores of an entry; None if it is not what was written under that name."""
    body = memoryview(content)[CHECKSUM:]
    if content[:CHECKSUM] != _checksum(name, body):
        return None
    return Scores(**load(bytes(body)))


def _checksum(name: str, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(body)
    return digest.digest()


def entry_name(identity: str, request: ScoreRequest) -> str:
    """Return the name of the scores that a teacher of this identity gives to a request."""
    want = request.want
    asked: list[object] = [FORMAT, identity, want.fields(), want.top_k, request.spans, len(request.tokens)]
    if request.constraints:
        asked.append(as_column(request.constraints))
    digest = hashlib.sha256(json.dumps(asked).encode() + b"\0")
    digest.update(_bytes(request.tokens))
    if want.given and request.ids is not None:
        digest.update(json.dumps(request.ids.shape).encode() + b"\0" + _bytes(request.ids))
    return digest.hexdigest()


def _bytes(ids: Tensor) -> bytes:
    return ids.long().contiguous().numpy().tobytes()


class CachedScorer:
    """A replica of a teacher that computes only the scores that the cache does not have.

    Equal requests that are under way at the same time are computed once. Files are read and written between two turns
    of the event loop, never beside it: whether scores were cached does not depend on timing.
    """

    def __init__(self, scorer: Scorer, cache: ScoreCache, identity: str) -> None:
        """`identity` names the teacher's weights and everything else about it that its scores depend on."""
        self.scorer, self.cache, self.identity = scorer, cache, identity
        self._under_way: dict[str, asyncio.Event] = {}
        self._told = CacheCounts()

    async def score(self, request: AnyScoreRequest) -> Scores:
        """Return the scores from the cache, or compute and store them."""
        if not isinstance(request, ScoreRequest):
            return await self.scorer.score(request)
        name = entry_name(self.identity, request)
        while (other := self._under_way.get(name)) is not None:
            await other.wait()
        found = self.cache.get(name)
        if found is not None:
            return found
        done = self._under_way[name] = asyncio.Event()
        try:
            scores = await self.scorer.score(request)
            self.cache.put(name, scores)
        finally:
            del self._under_way[name]
            done.set()
        return scores

    def recent(self) -> CacheCounts:
        """Return the counts since the last call."""
        found = self.cache.counts - self._told
        self._told = replace(self.cache.counts)
        return found
