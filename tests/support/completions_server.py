"""A small completions server over a tiny model, and a proxy before it that injects faults. Both are real HTTP servers
on threads of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "tiny"


class Refused(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Completions:
    """Answers completion requests with the log-probs of a saved model, in one of three dialects: vLLM's, `echo` with
    vLLM's token ids, and plain `echo` with token strings."""

    directory: Path
    speaks: Literal["vllm", "echo_ids", "echo"] = "vllm"
    max_logprobs: int = 20
    max_model_len: int | None = 256
    processed: bool = False
    """whether temperature changes the log-probs"""
    noise: float = 0.0
    """added to the log-probs of every other request"""
    tokenize: bool = True
    strings: bool = True
    """whether tokens are shown as strings; if not, all of them are empty"""
    key: str | None = None
    delay: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    """bodies of the completion requests"""
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.directory).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.directory)
        self._lock, self._under_way = threading.Lock(), 0

    def __call__(self, method: str, path: str, headers: Any, body: Any) -> Any:
        if self.key is not None and headers.get("Authorization") != f"Bearer {self.key}":
            raise Refused(401, f"wrong key {headers.get('Authorization')}")
        if path == "/v1/models":
            length = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
            return {"object": "list", "data": [{"id": MODEL, "object": "model", **length}]}
        if path == "/tokenize" and self.tokenize:
            with self._lock:
                return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if path != "/v1/completions":
            raise Refused(404, "no such path")
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            self.asked.append(body)
        try:
            time.sleep(self.delay)
            with self._lock:
                return self._complete(body)
        finally:
            with self._lock:
                self._under_way -= 1

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] != MODEL:
            raise Refused(404, f"no model {body['model']}")
        prompt = body["prompt"]
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        asked = body.get("prompt_logprobs") if self.speaks == "vllm" else body.get("logprobs")
        if self.speaks != "vllm" and "prompt_logprobs" in body:
            raise Refused(400, "prompt_logprobs is not known")
        if self.speaks == "echo" and "return_token_ids" in body:
            raise Refused(422, "return_token_ids is not known")
        if asked is not None and asked > self.max_logprobs:
            raise Refused(400, f"{asked} is above the {self.max_logprobs} log-probs that are allowed")
        if self.max_model_len is not None and len(tokens) + body["max_tokens"] > self.max_model_len:
            raise Refused(400, "too long")
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if body.get("return_token_ids") and self.speaks == "vllm":
            choice["prompt_token_ids"] = tokens
        if asked is not None:
            choice |= self._logprobs(tokens, asked, body.get("temperature", 1.0))
        return {"object": "text_completion", "choices": [choice]}

    @torch.no_grad()
    def _logprobs(self, tokens: list[int], k: int, temperature: float) -> dict[str, Any]:
        logits = self.model(torch.tensor([tokens])).logits[0].float()
        logp = (logits / temperature if self.processed else logits).log_softmax(-1)
        logp = logp + (self.noise if len(self.asked) % 2 else 0.0)
        rows: list[dict[int, float] | None] = [None]
        for position, token in enumerate(tokens[1:]):
            best = logp[position].topk(k) if k else None
            row = {token: float(logp[position, token])}
            if best is not None:
                row |= dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            rows.append(row)
        if self.speaks == "vllm":
            named = [None if r is None else {str(i): {"logprob": v, "rank": 1} for i, v in r.items()} for r in rows]
            return {"prompt_logprobs": named}
        show: Callable[[int], str] = (lambda token: f"token_id:{token}") if self.speaks == "echo_ids" else self._string
        taken = [None if r is None else r[t] for r, t in zip(rows, tokens, strict=True)]
        top = [None if r is None else {show(i): v for i, v in r.items()} for r in rows]
        shown = [show(token) for token in tokens]
        return {"logprobs": {"tokens": shown, "token_logprobs": taken, "top_logprobs": top}}

    def _string(self, token: int) -> str:
        return str(self.tokenizer.decode([token])) if self.strings else ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Callable[[str, str, Any, Any], Any]

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Any) -> None:
        try:
            status, answered = 200, type(self).answer(self.command, self.path, self.headers, body)
        except Refused as error:
            status, answered = error.status, {"error": {"message": str(error)}}
        content = json.dumps(answered).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        """A client that gave up is no error of the server."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a free port; gives the URL up to `/v1`."""
    server = _Threads(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve(completions: Completions) -> Iterator[str]:
    """Serve a model; gives the URL."""
    with serving(type("Handler", (_Handler,), {"answer": staticmethod(completions)})) as url:
        yield url


Fault = Literal[
    "429", "429 at a date", "500", "503", "408", "hang", "cut", "truncated", "short", "ids", "nan", "null", "endless",
    "redirect", "gzip", "not json", "minus infinity", "positive", "400", "401",
]  # fmt: skip


@dataclass
class Faults:
    """A proxy that spoils the answers to completion requests, each with the next of its faults."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    """spoils every answer"""
    retry_after: int = 1
    seen: int = 0
    """completion requests that arrived"""
    times: list[float] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """ends answers that hang"""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Fault | None:
        with self._lock:
            self.seen += 1
            self.times.append(time.monotonic())
            return self.always or (self.faults.pop(0) if self.faults else None)


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.faults.next() if self.path == "/v1/completions" else None
        if fault is None:
            self._pass(content)
        else:
            self._spoil(fault, content)

    def _pass(self, content: bytes | None) -> None:
        status, answer = self._ask(content)
        self._send(status, answer)

    def _ask(self, content: bytes | None) -> tuple[int, bytes]:
        connection = HTTPConnection(urlsplit(self.faults.upstream).netloc)
        kept = {name: value for name, value in self.headers.items() if name in ("Authorization", "Content-Type")}
        connection.request(self.command, self.path, content, kept)
        response = connection.getresponse()
        try:
            return response.status, response.read()
        finally:
            connection.close()

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _spoil(self, fault: Fault, content: bytes) -> None:
        echoed = f"refused: {self.headers.get('Authorization')}".encode()
        if fault == "429":
            self._send(429, echoed, Retry_After=str(self.faults.retry_after))
        elif fault == "429 at a date":
            then = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + self.faults.retry_after + 1))
            self._send(429, echoed, Retry_After=then)
        elif fault in ("500", "503", "408", "400", "401"):
            self._send(int(fault), echoed)
        elif fault == "redirect":
            self._send(307, b"", Location=self.faults.upstream + "/completions")
        elif fault == "hang":
            self.faults.released.wait(60)
            self.close_connection = True
        elif fault == "gzip":
            self._send(200, b"\x1f\x8b\x08", Content_Encoding="gzip")
        elif fault == "not json":
            self._send(200, b"<html>busy</html>")
        elif fault == "endless":
            self._endless()
        elif fault in ("cut", "truncated"):
            self._cut(fault, content)
        else:
            status, answer = self._ask(content)
            spoiled = json.dumps(_spoiled(json.loads(answer), fault)).encode()
            self._send(status, spoiled)

    def _cut(self, fault: Fault, content: bytes) -> None:
        _, answer = self._ask(content)
        half = answer[: len(answer) // 2]
        if fault == "truncated":
            self._send(200, half)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(half)
        self.close_connection = True

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(b'{"choices": [')
        while not self.faults.released.is_set():
            self.wfile.write(b" " * 65536)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _spoiled(answer: Any, fault: Fault) -> Any:
    choice = answer["choices"][0]
    values: dict[str, Any] = {"nan": float("nan"), "null": None, "minus infinity": -9999.0, "positive": 0.5}
    if "prompt_logprobs" not in choice:
        return answer
    rows = choice["prompt_logprobs"]
    if fault == "short":
        rows.pop()
    elif fault == "ids":
        choice["prompt_token_ids"][1] += 1
    else:
        for row in rows[1:]:
            for entry in row.values():
                entry["logprob"] = values[fault]
    return answer


@contextmanager
def faulty(upstream: str, *faults: Fault, **options: Any) -> Iterator[tuple[str, Faults]]:
    """A proxy before a server; gives its URL and its faults."""
    plan = Faults(upstream, list(faults), **options)
    with serving(type("Proxy", (_Proxy,), {"faults": plan})) as url:
        try:
            yield url, plan
        finally:
            plan.released.set()
