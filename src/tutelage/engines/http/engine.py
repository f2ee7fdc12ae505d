"""The engine behind a URL: servers that score token ids through the OpenAI-compatible completions API.

It holds connections and no model. Several servers are replicas behind a router, which also repeats requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import torch
from torch import Tensor

from tutelage.config.engines import ENGINES
from tutelage.engines.contract import (
    AnyOutput,
    AnyRequest,
    AnyScoreRequest,
    Engine,
    EngineError,
    ScoreRequest,
    Scores,
)
from tutelage.engines.http import wire
from tutelage.engines.http.connection import Connection, HttpCounts
from tutelage.engines.http.probe import find_dialect, fingerprint, finished
from tutelage.engines.registry import Endpoint, TextSpec
from tutelage.engines.text_requests import checked_score
from tutelage.routing.load_balancer import LocalLoadBalancer
from tutelage.routing.router import Router


class HttpEngine(Engine):
    """Scores through servers that have the same model. A request goes to the least busy one, and to another one if that
    fails; a server that may answer later is asked again until the deadline."""

    abilities = ENGINES["http"]
    shares_weights = False

    def __init__(self, name: str, endpoint: Endpoint, vocabulary: int, text: wire.Text | None = None) -> None:
        """`name` is for errors; `vocabulary` is the number of the student's ids; `text` decodes ids, to compare them
        with the strings of a server that names no ids."""
        self.endpoint = endpoint
        self.version = 0
        self.counts: HttpCounts = HttpCounts()
        self.servers = [HttpServer(Connection(endpoint, url, self.counts), vocabulary, text) for url in endpoint.urls]
        balancer = LocalLoadBalancer(len(self.servers), endpoint.max_in_flight)
        self._router = Router(name, self.servers, balancer, endpoint.deadline)
        self._in_flight = 0
        self._since = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for server in self.servers:
                await stack.enter_async_context(server.connection.open())
            yield

    async def generate(self, request: AnyRequest) -> AnyOutput:
        raise EngineError(f"request {request.id}: this engine only scores")

    async def score(self, request: AnyScoreRequest) -> Scores:
        asked = checked_score(request)
        if set(asked.want.fields()) - self.abilities.scores:
            raise EngineError(f"{asked.key}: this engine gives log-probs of tokens: sampled and likeliest ones")
        if not any(end > start for start, end in asked.spans):
            return _nothing(asked.want.top_k, asked.want.sampled)
        self._enter()
        try:
            return await self._router.call(tuple(asked.key.group), lambda server: server.score(asked))
        finally:
            self._leave()

    def abort(self, id: str) -> None:
        """There are no generations to end."""

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        """A teacher has no new weights, and the caches of servers are their own."""

    @property
    def identity(self) -> str:
        return finished(fingerprint(self.endpoint))

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def _enter(self) -> None:
        """Seconds count once, however many requests are under way."""
        if self._in_flight == 0:
            self._since = time.perf_counter()
        self._in_flight += 1

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self.counts.score_seconds += time.perf_counter() - self._since


class HttpServer:
    """One of the servers."""

    def __init__(self, connection: Connection, vocabulary: int, text: wire.Text | None) -> None:
        self.connection, self.vocabulary, self.text = connection, vocabulary, text
        self.dialect: wire.Dialect | None = None
        """found out with the first request"""
        self._finding = asyncio.Lock()

    async def score(self, request: ScoreRequest) -> Scores:
        tokens, k = request.tokens.tolist(), request.want.top_k
        dialect = self.dialect or await self._find_dialect(tokens)

        def read(answer: object) -> Scores:
            return wire.read_scores(wire.read_positions(dialect, answer, tokens, self.text), request, self.vocabulary)

        body = dialect.body(self.connection.endpoint.model, tokens, k)
        return await self.connection.post(wire.COMPLETIONS, body, wire.largest(len(tokens), k), read)

    async def _find_dialect(self, tokens: list[int]) -> wire.Dialect:
        async with self._finding:
            if self.dialect is None:
                self.dialect = await find_dialect(self.connection, tokens[:16], self.text)
            return self.dialect


def _nothing(k: int, sampled: bool) -> Scores:
    """The scores of no action."""
    return Scores(
        logp=torch.empty(0) if sampled else None,
        topk_ids=torch.empty(0, k, dtype=torch.int64) if k else None,
        topk_logp=torch.empty(0, k) if k else None,
    )


def build(spec: TextSpec) -> HttpEngine:
    """Connect to the servers; nothing is sent before the first request."""
    assert spec.endpoint is not None, "the engine http needs servers"
    return HttpEngine(f"teacher {spec.endpoint.model!r}", spec.endpoint, spec.vocabulary, spec.decode)
