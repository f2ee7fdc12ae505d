"""What a server can do, found out by asking it before a run starts.

Every finding comes from answers, not from what a server says about itself, except for the length of its context. The
same function that scores reads the answers, so a server that passes the probe is one that can be scored with.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from tutelage.config.engines import ENGINES, Abilities, ScoreField
from tutelage.engines.contract import EngineError
from tutelage.engines.http import wire
from tutelage.engines.http.connection import Connection, HttpCounts, StatusError, WrongAnswer
from tutelage.engines.registry import Endpoint
from tutelage.errors import ReplicaGone, UserError

T = TypeVar("T")

STRINGS = 200
"""Strings whose ids are compared."""
MOST_TOP_K = 1024
"""Likeliest tokens up to which the limit of a server is looked for."""
LONGEST = 600.0
"""Seconds that the probe of a server may take."""
PATIENCE = 20.0
"""Seconds after which the probe gives up a request that keeps failing."""
AT_ONCE = 16
"""Requests of the probe in flight."""
SENTENCE = "The quick brown fox jumps over 13 lazy dogs."
SMALL = 1 << 22
"""Bytes of an answer that does not grow with the request."""


class Vocabulary(Protocol):
    """The part of a tokenizer that the probe compares with."""

    vocabulary: dict[str, int]

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class ServerFindings:
    """What the probe found out about one server."""

    url: str
    dialect: wire.Dialect
    returns_ids: bool
    max_top_k: int
    """0: it cannot give the likeliest tokens by id; MOST_TOP_K stands for at least so many"""
    processed: bool
    """whether temperature changes its log-probs"""
    context: int | None
    """tokens that it takes; None if it does not say"""
    difference: float
    """between the log-probs of two equal requests"""
    tokenizer: str
    """how its ids were compared with ours"""

    def abilities(self) -> Abilities:
        """What an engine with this server can do."""
        scores: set[ScoreField] = {"sampled", "top_k"} if self.max_top_k else {"sampled"}
        return replace(ENGINES["http"], scores=frozenset(scores), max_top_k=self.max_top_k or None)

    def lines(self) -> list[str]:
        """The findings as the run prints them."""
        likeliest = f"up to {self.max_top_k}" + (" and more" if self.max_top_k == MOST_TOP_K else "")
        found = {
            "token ids": f"accepted, {'returned' if self.returns_ids else 'not returned'}",
            "log-probs": f"{self.dialect.kind}, {'processed; asked for at temperature 1' if self.processed else 'raw'}",
            "likeliest tokens": likeliest if self.max_top_k else "not by id",
            "given ids": "no",
            "context": f"{self.context} tokens" if self.context is not None else "not stated",
            "equal requests": f"differ by up to {self.difference:.1g}" if self.difference else "equal answers",
            "tokenizer": self.tokenizer,
        }
        return [f"  {name:<17}{value}" for name, value in found.items()]


async def find_dialect(connection: Connection, tokens: Sequence[int], text: wire.Text | None) -> wire.Dialect:
    """Return the first dialect in which a server answers a request for the log-probs of these tokens. Raises
    EngineError with its reasons if there is none."""
    reasons = []
    for dialect in wire.DIALECTS:
        try:
            positions = await _log_probs(connection, dialect, tokens, 1, text)
            return replace(dialect, names_ids=positions.named is not None)
        except (StatusError, WrongAnswer) as error:
            if isinstance(error, StatusError) and error.status not in (400, 404, 422):
                raise
            reasons.append(f"{dialect.kind} with max_tokens {dialect.max_tokens}: {error}")
            connection.forgive()
    raise EngineError(
        f"{connection.url} gives no log-probs of the tokens of a prompt that is sent as token ids, neither by "
        "prompt_logprobs nor by echo with logprobs. It said:\n  " + "\n  ".join(dict.fromkeys(reasons))
    )


async def probe(
    endpoint: Endpoint, url: str, tokenizer: Vocabulary, *, trust_tokenizer: bool = False
) -> ServerFindings:
    """Find out what one of the servers can do. Raises UserError if it cannot be used at all: it does not answer, gives
    no log-probs, or has another tokenizer."""
    connection = Connection(endpoint, url, HttpCounts())
    try:
        async with connection.open(), asyncio.timeout(LONGEST):
            return await _Probe(connection, tokenizer).run(trust_tokenizer)
    except TimeoutError:
        raise UserError(f"{url}: the probe found no end within {LONGEST:g} s") from None
    except (ReplicaGone, EngineError) as error:
        raise UserError(str(error)) from None


async def fingerprint(endpoint: Endpoint) -> str:
    """A name that changes with the address, the model and its weights: log-probs of a few ids, rounded. Raises
    UserError if the server does not answer."""
    url, tokens = endpoint.urls[0], list(range(1, 9))
    connection = Connection(endpoint, url, HttpCounts())
    try:
        async with connection.open():
            dialect = await _patiently(lambda: find_dialect(connection, tokens, None))
            found = await _patiently(lambda: _log_probs(connection, dialect, tokens, 1, None))
    except (ReplicaGone, EngineError) as error:
        raise UserError(str(error)) from None
    return json.dumps([endpoint.urls, endpoint.model, [round(float(value), 2) for value in found.taken[1:]]])


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also where an event loop is running already, as in a notebook or an actor."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@dataclass(slots=True)
class _Probe:
    connection: Connection
    tokenizer: Vocabulary

    async def run(self, trust_tokenizer: bool) -> ServerFindings:
        context = await self._context()
        tokens = self.tokenizer.encode(SENTENCE, special=False)[:16]
        dialect = await _patiently(lambda: find_dialect(self.connection, tokens, self.tokenizer.decode))
        first, again, warmer = [await self._taken(dialect, tokens, temperature) for temperature in (1.0, 1.0, 2.0)]
        difference = _largest_difference(first, again)
        ids = await self._returned_ids(dialect, tokens)
        return ServerFindings(
            url=self.connection.url,
            dialect=dialect,
            returns_ids=ids is not None or dialect.names_ids,
            max_top_k=await self._max_top_k(dialect, tokens) if dialect.names_ids else 0,
            processed=_largest_difference(first, warmer) > max(10 * difference, 1e-3),
            context=context,
            difference=difference,
            tokenizer=await self._compare_tokenizers(dialect, trust_tokenizer),
        )

    async def _context(self) -> int | None:
        """The length that a server states for the model, which must be among those that it lists."""
        url, model = self.connection.url, self.connection.endpoint.model

        def read(answer: Any) -> int | None:
            try:
                models = {str(model["id"]): model for model in answer["data"]}
            except (TypeError, KeyError):
                raise WrongAnswer("the list of models has no data with an id each") from None
            if model not in models:
                raise WrongModel(f"{url} serves no model {model!r}; it serves {', '.join(sorted(models)) or 'none'}")
            length = models[model].get("max_model_len")
            return length if isinstance(length, int) and length > 0 else None

        try:
            return await _patiently(lambda: self.connection.get("models", SMALL, read))
        except StatusError as error:
            if error.status != 404:
                raise
            return None

    async def _taken(self, dialect: wire.Dialect, tokens: Sequence[int], temperature: float) -> list[float]:
        positions = await _patiently(
            lambda: _log_probs(self.connection, dialect, tokens, 1, self.tokenizer.decode, temperature)
        )
        return [float(value) for value in positions.taken[1:]]

    async def _returned_ids(self, dialect: wire.Dialect, tokens: Sequence[int]) -> list[int] | None:
        body = dialect.body(self.connection.endpoint.model, tokens, 1)
        return await _patiently(lambda: self.connection.post(wire.COMPLETIONS, body, SMALL, wire.prompt_ids))

    async def _max_top_k(self, dialect: wire.Dialect, tokens: Sequence[int]) -> int:
        """The largest number of likeliest tokens that it gives, up to MOST_TOP_K and the vocabulary."""
        most = min(MOST_TOP_K, len(self.tokenizer.vocabulary))
        good, bad = 0, most + 1
        while bad - good > 1:
            k = min(max(2 * good, 1), most) if bad > most else (good + bad) // 2
            if await self._gives(dialect, tokens[:4], k):
                good = k
            else:
                bad = k
        return good

    async def _gives(self, dialect: wire.Dialect, tokens: Sequence[int], k: int) -> bool:
        try:
            positions = await _patiently(lambda: _log_probs(self.connection, dialect, tokens, k, self.tokenizer.decode))
            return positions.named is not None and min(positions.named(range(1, len(tokens))).widths) >= k
        except (StatusError, WrongAnswer) as error:
            if isinstance(error, StatusError) and error.status not in (400, 422):
                raise
            self.connection.forgive()
            return False
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):  # named by something else than ids
            return False

    # ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _compare_tokenizers(self, dialect: wire.Dialect, trusted: bool) -> str:
        """Compare the ids of STRINGS strings. Raises UserError if one differs, or if the server shows neither ids nor
        strings and is not trusted."""
        strings = varied_strings(self.tokenizer)
        for how, compare in (
            ("/tokenize", self._by_tokenize),
            ("the ids of its answers", self._by_ids),
            ("its token strings", self._by_strings),
        ):
            if await compare(dialect, strings[0]):
                await _all_of(compare, dialect, strings[1:])
                return f"the student's, on {len(strings)} strings (by {how})"
        if trusted:
            return "not compared: the recipe trusts it (trust_tokenizer)"
        raise UserError(
            f"{self.connection.url} shows neither the ids nor the strings of its tokens, so nothing says that "
            "its tokenizer is the student's: set trust_tokenizer: true if you know that it is"
        )

    async def _by_tokenize(self, dialect: wire.Dialect, string: str) -> bool:
        body = {"model": self.connection.endpoint.model, "prompt": string, "add_special_tokens": False}

        def read(answer: Any) -> list[int] | None:
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            return tokens if isinstance(tokens, list) else None

        try:
            theirs = await _patiently(lambda: self.connection.post("/tokenize", body, SMALL, read))
        except StatusError:
            return False
        return self._same(string, theirs, special=False)

    async def _by_ids(self, dialect: wire.Dialect, string: str) -> bool:
        body = dialect.body(self.connection.endpoint.model, string, 1)
        read = partial(wire.shown_ids, dialect)
        try:
            theirs = await _patiently(lambda: self.connection.post(wire.COMPLETIONS, body, SMALL, read))
        except StatusError:
            return False
        return self._same(string, theirs, special=True)

    def _same(self, string: str, theirs: list[int] | None, *, special: bool) -> bool:
        """Whether there are ids to compare. Raises UserError if they differ."""
        if theirs is None:
            return False
        ours = self.tokenizer.encode(string, special=special)
        if theirs != ours:
            raise UserError(
                f"{self.connection.url} has another tokenizer than the student: {string!r} is {theirs} there "
                f"and {ours} here. A teacher scores the student's token ids, so both must have one tokenizer"
            )
        return True

    async def _by_strings(self, dialect: wire.Dialect, string: str) -> bool:
        """Send our ids and compare the strings of the tokens that come back: `read_positions` does."""
        if dialect.kind != "echo" or dialect.names_ids:
            return False
        ids = self.tokenizer.encode(string, special=False)
        tokens = ids if len(ids) > 1 else ids * 2
        try:
            positions = await _patiently(lambda: _log_probs(self.connection, dialect, tokens, 1, self.tokenizer.decode))
        except WrongAnswer as error:
            raise UserError(f"{error}. The tokenizers of student and teacher must be the same") from None
        return 2 * positions.compared >= len(tokens)


async def _all_of(
    compare: Callable[[wire.Dialect, str], Awaitable[bool]], dialect: wire.Dialect, strings: Sequence[str]
) -> None:
    free = asyncio.Semaphore(AT_ONCE)

    async def one(string: str) -> None:
        async with free:
            await compare(dialect, string)

    try:
        async with asyncio.TaskGroup() as tasks:
            for string in strings:
                tasks.create_task(one(string))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class WrongModel(EngineError):
    """The server does not serve the model of the recipe."""


async def _log_probs(
    connection: Connection,
    dialect: wire.Dialect,
    tokens: Sequence[int],
    k: int,
    text: wire.Text | None,
    temperature: float = 1.0,
) -> wire.Positions:
    def read(answer: Any) -> wire.Positions:
        positions = wire.read_positions(dialect, answer, tokens, text)
        wire.log_probs(positions.taken[1:])
        return positions

    body = dialect.body(connection.endpoint.model, list(tokens), k, temperature)
    return await connection.post(wire.COMPLETIONS, body, wire.largest(len(tokens), k), read)


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again as long as a server says that it may answer later; the deadline of the probe ends it."""
    started = time.monotonic()
    while True:
        try:
            return await ask()
        except ReplicaGone as error:
            if time.monotonic() - started > PATIENCE:
                raise
            await asyncio.sleep(error.after or 0.0)


def _largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(first, second, strict=True)), default=0.0)


_PIECES = (
    "the", "quick", "Brown", "FOX", "don't", "re-use", "naïve", "Straße", "übermäßig", "ça", "señor", "Київ", "Москва",
    "你好", "世界", "こんにちは", "안녕하세요", "مرحبا", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "e\u0301", "½", "∑", "→",
    "3.14159", "1234567", "0x1F", "1e-05", "2026-01-31", "$9.99", "50%", "a_b", "camelCase", "def f(x):", "return x",
    "{\"k\": [1]}", "<b>", "</b>", "http://a.b/c?d=e", "x=1;", "!=", "...", "—", "“quoted”", "\\n", "#1", "@you", "\t",
)  # fmt: skip
_JOINTS = (" ", "", "  ", "\n", ", ", "\n\n", "\t", "   ")


def varied_strings(tokenizer: Vocabulary) -> list[str]:
    """STRINGS strings that tokenizers split differently: scripts, numbers, code, spaces, and the student's special
    tokens as text. Always the same for a tokenizer."""
    draw = random.Random(0)
    special = sorted(token for token in tokenizer.vocabulary if token.startswith("<") and token.endswith(">"))[:20]
    strings = [SENTENCE, *_PIECES, *special]
    while len(strings) < STRINGS:
        parts = [draw.choice((*_PIECES, *special)) for _ in range(draw.randint(2, 8))]
        strings.append("".join(part + draw.choice(_JOINTS) for part in parts))
    return strings[:STRINGS]
