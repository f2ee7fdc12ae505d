"""Compare the throughput of the engine behind a URL with that of a bare asynchronous HTTP client.

    python -m bench.http_client           400 requests per round, 11 rounds
    python -m bench.http_client --tiny    16 requests, once, to check that both sides run

Both sides send the same bodies with 64 requests in flight to a server in a process of its own, which has all answers
ready, so that the clients are what takes time. The bare side is httpx with one AsyncClient; it parses the JSON of each
answer and does nothing else. Ours routes, bounds, counts and checks each answer and makes tensors of it. The sides take
turns; the figures are medians of rounds, and the ratio is the median of the ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx2
import torch

from tutelage.data.trajectory import Key
from tutelage.engines.contract import ScoreRequest, Want
from tutelage.engines.http.engine import HttpEngine
from tutelage.engines.http.wire import DIALECTS
from tutelage.engines.registry import Endpoint

IN_FLIGHT = 64
PROMPT, ANSWER = 96, 64
"""Tokens of a prompt and of an answer."""
VOCABULARY = 50_000
WANTED = 0.9
"""Least share of the bare client's throughput."""
PAYLOADS = {"sampled": Want(sampled=True), "top_k 20": Want(sampled=True, top_k=20)}


class Size(NamedTuple):
    requests: int = 400
    rounds: int = 11


TINY = Size(16, 1)


class Exchange(NamedTuple):
    """A request in three forms: as it is scored, as it is sent, and as it is answered."""

    request: ScoreRequest
    body: bytes
    answer: bytes


def exchanges(want: Want, count: int) -> list[Exchange]:
    """Make requests and answers as vLLM writes them."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (PROMPT + ANSWER,), generator=draw)
        named = torch.randint(VOCABULARY, (len(tokens), want.top_k + 1), generator=draw).tolist()
        rows = [
            {
                str(token): {"logprob": -4.0 - rank / 8, "rank": rank + 1, "decoded_token": f" t{token}"}
                for rank, token in enumerate(dict.fromkeys([own, *others]))
            }
            for own, others in zip(tokens.tolist(), named, strict=True)
        ]
        choice = {"index": 0, "text": " a", "prompt_logprobs": [None, *rows[1:]], "prompt_token_ids": tokens.tolist()}
        body = json.dumps(DIALECTS[0].body("model", tokens.tolist(), want.top_k), separators=(",", ":"))
        request = ScoreRequest(Key("bench", number, 0, 0, 0), tokens, ((PROMPT, PROMPT + ANSWER),), want, "teacher")
        found.append(Exchange(request, body.encode(), json.dumps({"choices": [choice]}).encode()))
    return found


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def serve(file: Path) -> None:
    """Answer every known body at once, until the process is ended. Prints the port."""
    pairs = json.loads(file.read_text())
    answers = {body.encode(): answer.encode() for body, answer in pairs}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                answer = answers[await reader.readexactly(length)]
                start = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(answer)}\r\n\r\n"
                writer.write(start.encode() + answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def serving(work: Sequence[Exchange]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([(e.body.decode(), e.answer.decode()) for e in work], file)
        file.flush()
        words = [sys.executable, "-m", "bench.http_client", "--serve", file.name]
        with subprocess.Popen(words, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
            finally:
                process.terminate()


# ── the sides ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def all_of(work: Sequence[Exchange], one: Callable[[Exchange], Awaitable[object]]) -> float:
    """Requests per second with IN_FLIGHT of them under way."""
    left = iter(work)

    async def worker() -> None:
        for exchange in left:
            await one(exchange)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return len(work) / (time.perf_counter() - started)


async def bare(url: str, work: Sequence[Exchange]) -> float:
    limits = httpx2.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    headers = {"Content-Type": "application/json"}
    async with httpx2.AsyncClient(limits=limits, timeout=None) as client:

        async def one(exchange: Exchange) -> None:
            response = await client.post(f"{url}/completions", content=exchange.body, headers=headers)
            response.json()

        return await all_of(work, one)


async def ours(url: str, work: Sequence[Exchange]) -> float:
    engine = HttpEngine("teacher", Endpoint((url,), "model", max_in_flight=IN_FLIGHT), VOCABULARY)
    for server in engine.servers:
        server.dialect = DIALECTS[0]
    async with engine.running():
        rate = await all_of(work, lambda exchange: engine.score(exchange.request))
    if engine.counts.answers != len(work):
        raise SystemExit(f"the server answered wrong: {engine.counts.failures}")
    return rate


def measure(want: Want, size: Size) -> dict[str, float]:
    work = exchanges(want, size.requests)
    rates: dict[str, list[float]] = {"bare": [], "ours": []}
    with serving(work) as url:
        for number in range(size.rounds + 1):
            for name, side in (("bare", bare), ("ours", ours)):
                rate = asyncio.run(side(url, work))
                if number or size.rounds == 1:  # the first round warms up
                    rates[name].append(rate)
    found = {name: median(each) for name, each in rates.items()}
    return {**found, "ratio": median(a / b for a, b in zip(rates["ours"], rates["bare"], strict=True))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small round, to check that it runs")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(args.serve))
        return
    for name, want in PAYLOADS.items():
        found = measure(want, TINY if args.tiny else Size())
        verdict = "" if args.tiny or found["ratio"] >= WANTED else f", below {WANTED}"
        print(
            f"{name:<9} bare {found['bare']:7.0f} requests/s  ours {found['ours']:7.0f} requests/s  "
            f"ratio {found['ratio']:.3f}{verdict}"
        )


if __name__ == "__main__":
    main()
