"""Test the engine behind a URL against a real vLLM server on the CPU: the probe, scores, faults before it, a run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import engine_requests as asked
import tiny
from completions_server import Fault, faulty
from tutelage import loop
from tutelage.engines.contract import ScoreRequest, Scores, Want
from tutelage.engines.http import connection
from tutelage.engines.http.engine import HttpEngine
from tutelage.engines.http.probe import ServerFindings, probe
from tutelage.engines.http.wire import DIALECTS
from tutelage.engines.registry import Endpoint
from tutelage.engines.torch_lm import TorchEngine
from tutelage.models.causal_lm import CausalLM
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.routing.router import AllReplicasFailed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: `make test-vllm` runs these"),
]

MODEL, KEY = "tiny", "sk-vllm-test"
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""vLLM computes heads of 32 dimensions and more."""
VOCABULARY, LIMIT, CONTEXT = 270, 32, 512
STARTS = 240.0
"""Seconds that the server may take to start."""
TOKENS = torch.tensor([3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("vllm") / "teacher", seed=1, **SIZES)


@pytest.fixture(scope="module")
def url(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", str(directory), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", str(CONTEXT), "--max-logprobs", str(LIMIT), "--max-num-seqs", "8"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_API_KEY": KEY,
    }
    log = tmp_path_factory.mktemp("log") / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        _wait_until_up(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def _wait_until_up(server: subprocess.Popen[bytes], health: str, log: Path) -> None:
    end = time.monotonic() + STARTS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the vLLM server did not start:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setattr(connection, "BACK_OFF", 0.05)


def endpoint(*urls: str, deadline: float = 60.0) -> Endpoint:
    return Endpoint(urls, MODEL, "TEACHER_KEY", deadline=deadline)


def scores(target: HttpEngine, *requests: ScoreRequest) -> list[Scores]:
    async def main() -> list[Scores]:
        async with asyncio.timeout(120), target.running():
            return await asyncio.gather(*(target.score(request) for request in requests))

    return asyncio.run(main())


def own(directory: Path, requests: Sequence[ScoreRequest]) -> list[Scores]:
    from transformers import AutoModelForCausalLM

    from tutelage.models.attention import NAME

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=NAME).eval()
    return asked.scored(TorchEngine(CausalLM(model), vocabulary=VOCABULARY), requests)


def request(want: Want, shift: int = 0) -> ScoreRequest:
    return asked.score_request(TOKENS.roll(shift), (3, 7), (9, 12), uid=shift, want=want)


@pytest.fixture(scope="module")
def findings(directory: Path, url: str) -> ServerFindings:
    os.environ["TEACHER_KEY"] = KEY
    return asyncio.run(probe(endpoint(url), url, SafeTokenizer.load(directory)))


def test_the_probe_finds_what_the_server_was_started_with(findings: ServerFindings) -> None:
    print("\n".join(findings.lines()))
    assert findings.dialect.kind == "prompt_logprobs"
    assert findings.returns_ids
    assert findings.max_top_k == LIMIT
    assert findings.context == CONTEXT
    assert not findings.processed
    assert findings.difference < 1e-4
    assert findings.tokenizer == "the student's, on 200 strings (by /tokenize)"


@pytest.mark.parametrize("want", [Want(sampled=True), Want(sampled=True, top_k=LIMIT)])
@pytest.mark.parametrize("dialect", [DIALECTS[0], DIALECTS[1]], ids=["prompt_logprobs", "echo"])
def test_scores_are_those_of_the_embedded_engine(directory: Path, url: str, want: Want, dialect: object) -> None:
    requests = [request(want, shift) for shift in range(6)]
    target = HttpEngine("teacher", endpoint(url), VOCABULARY)
    target.servers[0].dialect = dialect  # type: ignore[assignment]
    for found, expected in zip(scores(target, *requests), own(directory, requests), strict=True):
        torch.testing.assert_close(found.logp, expected.logp, atol=1e-4, rtol=0)
        if want.top_k:
            torch.testing.assert_close(found.topk_logp, expected.topk_logp, atol=1e-4, rtol=0)
    assert target.counts.failures == {}


@pytest.mark.parametrize("fault", ["429", "500", "hang", "cut", "truncated"])
def test_a_fault_before_it_is_retried(directory: Path, url: str, fault: Fault) -> None:
    wanted = request(Want(sampled=True))
    with faulty(url, fault, retry_after=0) as (address, _):
        target = HttpEngine("teacher", endpoint(address, deadline=6.0), VOCABULARY)
        target.servers[0].dialect = DIALECTS[0]
        [found] = scores(target, wanted)
    torch.testing.assert_close(found.logp, own(directory, [wanted])[0].logp, atol=1e-4, rtol=0)
    assert sum(target.counts.failures.values()) == 1


@pytest.mark.parametrize("fault", ["short", "ids", "nan", "endless"])
def test_a_wrong_answer_before_it_is_counted(url: str, fault: Fault) -> None:
    with faulty(url, always=fault) as (address, _):
        target = HttpEngine("teacher", endpoint(address, deadline=10.0), VOCABULARY)
        target.servers[0].dialect = DIALECTS[0]
        with pytest.raises(AllReplicasFailed):
            scores(target, request(Want(sampled=True)))
    assert target.counts.failures == {f"{address}: wrong answer": 1}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"objective": "k1", "payload": "sampled", "form": "policy_gradient"},
        {"objective": "reverse_kl", "payload": "top_k", "top_k": 8},
    ],
    ids=["sampled", "top_k"],
)
def test_a_student_learns_from_it(tmp_path: Path, url: str, algorithm: dict[str, object]) -> None:
    settings = tiny.settings(tmp_path, steps=2, algorithm=algorithm)
    settings["teachers"] = {"main": {"url": url, "model": MODEL, "key_env": "TEACHER_KEY"}}
    run = loop.train(tiny.Config.model_validate(settings))
    counts = json.loads((run / "summary.json").read_text())["teachers"]["main"]
    assert counts["requests"] == counts["answers"] > 0
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
