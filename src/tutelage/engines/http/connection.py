"""One server: its connections, its key, and how long it is left alone after it failed.

A request fails in one of two ways. `ReplicaGone` means that it may succeed later or elsewhere: status 408, 429 or 5xx,
no answer in time, a broken connection, an answer that is not JSON. `EngineError` means that asking again does not help:
any other status, or an answer that is wrong. Both are counted.

After a failure the server is left alone for a while, which doubles with every further failure in a row and is at least
what the server asks for with Retry-After. Requests that come meanwhile raise `ReplicaGone` at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2
from pydantic_core import from_json

from tutelage.engines.contract import EngineCounts, EngineError
from tutelage.engines.registry import Endpoint
from tutelage.errors import ReplicaGone, UserError

T = TypeVar("T")

POOL = 8
"""Connections of one pool: httpx looks at all connections of a pool for every request."""
ATTEMPTS = 3
"""A single request may take this part of the deadline."""
BACK_OFF = 0.25
"""Seconds that a server is left alone after its first failure."""
LONGEST_BACK_OFF = 30.0
RETRIED = frozenset({408, 429})
"""Statuses below 500 that may go away."""
QUOTED = 300
"""Characters of a server's own words in an error message."""


class WrongAnswer(EngineError):
    """A server answered something that cannot be right."""


@dataclass(slots=True)
class HttpCounts(EngineCounts):
    """What the servers of a teacher were asked, and what came of it."""

    requests: int = 0
    answers: int = 0
    """requests that were answered, and rightly"""
    failures: dict[str, int] = field(default_factory=dict)
    """the other requests, by server and kind of failure"""


class Connection:
    """Sends requests to one server."""

    def __init__(self, endpoint: Endpoint, url: str, counts: HttpCounts) -> None:
        self.endpoint, self.url, self.counts = endpoint, url, counts
        self.timeout = endpoint.deadline / ATTEMPTS
        self._key = read_key(endpoint.key_env)
        self._clients: deque[httpx2.AsyncClient] = deque()
        """used in turn"""
        self._failures = 0
        """in a row; those of requests that ran side by side are one"""
        self._closed_until = 0.0
        self._reason = ""
        self._jitter = random.Random()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep connections to the server while entered."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        limits, verify = (
            httpx2.Limits(max_connections=None, max_keepalive_connections=POOL),
            httpx2.create_ssl_context(),
        )
        async with AsyncExitStack() as stack:
            for _ in range(-(-self.endpoint.max_in_flight // POOL)):
                client = httpx2.AsyncClient(
                    headers=headers, limits=limits, verify=verify, timeout=None, follow_redirects=False
                )
                self._clients.append(await stack.enter_async_context(client))
            try:
                yield
            finally:
                self._clients.clear()

    async def post(self, path: str, body: Mapping[str, Any], limit: int, read: Callable[[Any], T]) -> T:
        """Send a JSON object to a path below the server's URL (or below its root, if the path begins with a slash), and
        return what `read` makes of the answer. `read` raises WrongAnswer if the answer is wrong; an answer of more than
        `limit` bytes is wrong too."""
        content = json.dumps(body, separators=(",", ":")).encode()
        return await self._ask("POST", path, content, limit, read)

    async def get(self, path: str, limit: int, read: Callable[[Any], T]) -> T:
        """Like `post`, without a body."""
        return await self._ask("GET", path, None, limit, read)

    async def _ask(self, method: str, path: str, content: bytes | None, limit: int, read: Callable[[Any], T]) -> T:
        wait = self._closed_until - time.monotonic()
        if wait > 0:
            raise ReplicaGone(f"{self.url} is left alone for {wait:.1f} s: {self._reason}", after=wait)
        self.counts.requests += 1
        try:
            async with asyncio.timeout(self.timeout):
                status, headers, answer = await self._exchange(method, path, content, limit)
        except asyncio.CancelledError:
            self._count("given up")
            raise
        except TimeoutError:
            raise self._gone("timeout", f"no answer within {self.timeout:g} s") from None
        except httpx2.TransportError as error:
            raise self._gone("connection", f"{type(error).__name__} {error}".strip()) from None
        except WrongAnswer as error:
            raise self._wrong(str(error)) from None
        if status != 200:
            raise self._refused(status, headers, answer)
        try:
            parsed = from_json(answer)  # twice as fast as the standard library's
        except ValueError as error:
            raise self._gone("not JSON", f"the answer is not JSON: {error}") from None
        try:
            result = read(parsed)
        except WrongAnswer as error:
            raise self._wrong(str(error)) from None
        self.counts.answers += 1
        self._failures = 0
        return result

    async def _exchange(
        self, method: str, path: str, content: bytes | None, limit: int
    ) -> tuple[int, httpx2.Headers, bytearray]:
        """Read at most `limit` bytes of an answer."""
        assert self._clients, "the engine is not running"
        self._clients.rotate()
        url = self.url.removesuffix("/v1") + path if path.startswith("/") else f"{self.url}/{path}"
        typed = {"Content-Type": "application/json"} if content is not None else None
        async with self._clients[0].stream(method, url, content=content, headers=typed) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise WrongAnswer("the answer is compressed although the request forbids it")
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > limit:
                    raise WrongAnswer(f"the answer has more than {limit:,} bytes")
            return response.status_code, response.headers, answer

    def forgive(self) -> None:
        """Ask the server again at once: the failure was that of a request which only tried something."""
        self._failures, self._closed_until = 0, 0.0

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refused(self, status: int, headers: httpx2.Headers, answer: bytearray) -> Exception:
        said = self._without_key(answer[: 4 * QUOTED].decode(errors="replace"))[:QUOTED]
        if status in RETRIED or status >= 500:
            return self._gone(f"status {status}", f"status {status}: {said}", _retry_after(headers))
        self._count(f"status {status}")
        if 300 <= status < 400:
            said = f"a redirect to {self._without_key(headers.get('location', ''))!r}, and redirects are not followed"
        if status in (401, 403):
            said = f"{said} ({_about_key(self.endpoint.key_env)})"
        return StatusError(status, f"{self.url} answered with status {status}: {said}")

    def _gone(self, kind: str, message: str, after: float | None = None) -> ReplicaGone:
        wait = self._close(kind, message, after)
        return ReplicaGone(f"{self.url}: {self._without_key(message)}", after=wait)

    def _wrong(self, message: str) -> WrongAnswer:
        self._close("wrong answer", message, None)
        return WrongAnswer(f"{self.url} answered wrong: {self._without_key(message)}")

    def _close(self, kind: str, message: str, after: float | None) -> float:
        """Count a failure and leave the server alone; return for how many seconds."""
        self._count(kind)
        now = time.monotonic()
        if now >= self._closed_until:
            self._failures += 1
        wait = min(BACK_OFF * 2.0 ** (self._failures - 1), LONGEST_BACK_OFF) * self._jitter.uniform(0.75, 1.0)
        self._closed_until = max(self._closed_until, now + max(wait, after or 0.0))
        self._reason = self._without_key(message)
        return self._closed_until - now

    def _count(self, kind: str) -> None:
        name = f"{self.url}: {kind}"
        self.counts.failures[name] = self.counts.failures.get(name, 0) + 1

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text


class StatusError(EngineError):
    """A server refused a request, and would again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[StatusError], tuple[int, str]]:
        return type(self), (self.status, str(self))


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable. Raises UserError, without the key, if there is none that can be sent."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(f"key_env: the environment variable {variable} is not set in this process")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"key_env: the value of {variable} cannot be a key: it has a space, a line break or another character that "
            "an HTTP header must not have"
        )
    return key


def _about_key(variable: str | None) -> str:
    return "the recipe names no key_env" if variable is None else f"the key is that of {variable}"


def _retry_after(headers: httpx2.Headers) -> float | None:
    """Seconds of a Retry-After header, which has a number or a date."""
    said = headers.get("retry-after", "").strip()
    if said.isdecimal() and len(said) < 10:
        return float(said)
    try:
        return max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None
