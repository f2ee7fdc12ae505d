"""Test the engine behind a URL: right scores or a counted failure, whatever a server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
import torch

import completions_server as served
import engine_requests as asked
import tiny
from completions_server import MODEL, Completions, Fault, faulty, serve
from tutelage.engines.contract import EngineError, GenerateRequest, Sampling, ScoreRequest, Scores, Want
from tutelage.engines.http import connection
from tutelage.engines.http.engine import HttpEngine, build
from tutelage.engines.http.wire import DIALECTS
from tutelage.engines.registry import Endpoint, TextSpec
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import UserError
from tutelage.models.causal_lm import CausalLM
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.routing.router import AllReplicasFailed

T = TypeVar("T")
VOCABULARY = 270
KEY = "sk-very-secret"
TOKENS = torch.tensor([3, 14, 15, 92, 65, 35, 89, 79, 32, 38])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("served") / "model", seed=1)


@pytest.fixture(scope="module")
def completions(directory: Path) -> Completions:
    return Completions(directory)


@pytest.fixture(scope="module")
def url(completions: Completions) -> Iterator[str]:
    with serve(completions) as address:
        yield address


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACK_OFF", 0.01)
    monkeypatch.setattr(connection, "LONGEST_BACK_OFF", 0.05)


def engine(*urls: str, text: Callable[[list[int]], str] | None = None, **options: Any) -> HttpEngine:
    return HttpEngine("teacher", Endpoint(urls, MODEL, **{"deadline": 10.0, **options}), VOCABULARY, text)


def during(target: HttpEngine, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        async with asyncio.timeout(asked.HANGS), target.running():
            return await work()

    return asyncio.run(main())


def scores(target: HttpEngine, *requests: ScoreRequest) -> list[Scores]:
    async def work() -> list[Scores]:
        return await asyncio.gather(*(target.score(request) for request in requests))

    return during(target, work)


def request(want: Want | None = None, *spans: tuple[int, int], tokens: torch.Tensor = TOKENS) -> ScoreRequest:
    return asked.score_request(tokens, *(spans or ((4, 7), (8, 10))), want=want)


def own(directory: Path, requests: Sequence[ScoreRequest]) -> list[Scores]:
    """The scores of the embedded engine."""
    model = TorchEngine(CausalLM(tiny.model(seed=1)), vocabulary=VOCABULARY)
    return asked.scored(model, requests)


def assert_same(found: Scores, expected: Scores) -> None:
    if expected.logp is not None:
        assert found.logp is not None
        torch.testing.assert_close(found.logp, expected.logp, atol=1e-5, rtol=0)
    if expected.topk_logp is not None:
        assert found.topk_logp is not None
        torch.testing.assert_close(found.topk_logp, expected.topk_logp, atol=1e-5, rtol=0)
        assert found.topk_ids is not None
        assert torch.equal(found.topk_ids, expected.topk_ids)
    assert found.mass_outside is None


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("want", [Want(sampled=True), Want(top_k=5), Want(sampled=True, top_k=20)])
@pytest.mark.parametrize("speaks", ["vllm", "echo_ids"])
def test_scores_are_those_of_the_embedded_engine(directory: Path, speaks: Any, want: Want) -> None:
    requests = [request(want), request(want, (1, 10)), request(want, (1, 4), tokens=TOKENS[2:7])]
    with serve(Completions(directory, speaks=speaks)) as address:
        found = scores(engine(address), *requests)
    for one, expected in zip(found, own(directory, requests), strict=True):
        assert_same(one, expected)


def test_a_server_with_token_strings_gives_the_sampled_token_only(directory: Path) -> None:
    text = SafeTokenizer.load(directory).decode
    with serve(Completions(directory, speaks="echo")) as address:
        target = engine(address, text=text)
        [found] = scores(target, request())
        assert_same(found, own(directory, [request()])[0])
        with pytest.raises(AllReplicasFailed, match="does not name the likeliest tokens by id"):
            scores(target, request(Want(top_k=3)))


def test_a_token_with_another_string_is_a_wrong_answer(directory: Path) -> None:
    with (
        serve(Completions(directory, speaks="echo")) as address,
        pytest.raises(AllReplicasFailed, match="here and"),
    ):
        scores(engine(address, text=lambda ids: "x"), request())


def test_no_actions_need_no_request(url: str, completions: Completions) -> None:
    before = len(completions.asked)
    target = engine(url)
    none = asked.score_request(TOKENS, want=Want(sampled=True, top_k=3))
    [found] = scores(target, none)
    assert found.logp is not None
    assert found.logp.shape == (0,)
    assert found.topk_ids is not None
    assert found.topk_ids.shape == (0, 3)
    assert len(completions.asked) == before


def test_requests_ask_for_temperature_one_without_truncation_and_by_ids(directory: Path) -> None:
    server = Completions(directory)
    with serve(server) as address:
        scores(engine(address), request(Want(top_k=7)))
    body = server.asked[-1]
    assert body["prompt"] == TOKENS.tolist()
    assert (body["temperature"], body["top_p"], body["prompt_logprobs"]) == (1.0, 1.0, 7)


def test_what_the_engine_cannot_do_is_refused(url: str) -> None:
    target = engine(url)

    async def generate() -> None:
        await target.generate(GenerateRequest("r", TOKENS, Sampling(), 0))

    with pytest.raises(EngineError, match="only scores"):
        during(target, generate)
    for want in (Want(hidden=True), Want(given=True)):
        with pytest.raises(EngineError, match="sampled and likeliest"):
            scores(target, request(want))
    for spans in ([(0, 3)], [(5, 11)], [(4, 6), (5, 7)]):
        with pytest.raises(EngineError, match="lies outside"):
            scores(target, request(Want(sampled=True), *spans))


def test_the_registry_builds_it(url: str) -> None:
    spec = TextSpec("teacher", "", "cpu", tiny.causal_lm, VOCABULARY, 64, endpoint=Endpoint((url,), MODEL))
    assert scores(build(spec), request())[0].logp is not None


def test_an_id_that_the_student_lacks_is_a_wrong_answer(url: str) -> None:
    small = HttpEngine("teacher", Endpoint((url,), MODEL, deadline=10.0), vocabulary=2)
    with pytest.raises(AllReplicasFailed, match="the student's end at 1"):
        scores(small, request(Want(top_k=20)))


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PASSING: list[Fault] = ["429", "429 at a date", "500", "503", "408", "hang", "cut", "truncated", "not json"]
WRONG: list[Fault] = ["short", "ids", "nan", "null", "minus infinity", "positive", "gzip", "endless"]
REFUSED: list[Fault] = ["redirect", "400", "401"]


def ready(*addresses: str, **options: Any) -> HttpEngine:
    """An engine that knows the dialect of its server, so that faults hit score requests."""
    target = engine(*addresses, **options)
    for server in target.servers:
        server.dialect = DIALECTS[0]
    return target


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_retried_and_counted(url: str, directory: Path, fault: Fault) -> None:
    with faulty(url, fault, retry_after=0) as (address, faults):
        target = ready(address, deadline=1.5)
        [found] = scores(target, request(Want(sampled=True, top_k=4)))
    assert_same(found, own(directory, [request(Want(sampled=True, top_k=4))])[0])
    assert faults.seen == 2
    assert target.counts.requests == 2
    assert target.counts.answers == 1
    assert sum(target.counts.failures.values()) == 1
    assert target.in_flight == 0


@pytest.mark.parametrize("fault", [*WRONG, *REFUSED])
def test_a_wrong_answer_is_a_counted_failure(url: str, fault: Fault) -> None:
    with faulty(url, always=fault) as (address, faults):
        target = ready(address)
        with pytest.raises(AllReplicasFailed) as error:
            scores(target, request(Want(sampled=True, top_k=4)))
    assert faults.seen == 1, "asking again would not help"
    assert address in str(error.value)
    assert (target.counts.requests, target.counts.answers) == (1, 0)
    assert sum(target.counts.failures.values()) == 1


@pytest.mark.parametrize("fault", ["hang", "429", "500", "cut", "not json"])
def test_nothing_hangs_past_the_deadline(url: str, fault: Fault) -> None:
    with faulty(url, always=fault, retry_after=30) as (address, _):
        target = ready(address, deadline=0.3)
        with pytest.raises(AllReplicasFailed, match=r"within 0\.3 s|no replica could answer"):
            scores(target, request())
    assert target.counts.answers == 0
    assert sum(target.counts.failures.values()) == target.counts.requests >= 1


@pytest.mark.parametrize("fault", [*PASSING, *WRONG, *REFUSED])
def test_another_replica_answers_for_one_that_fails(url: str, directory: Path, fault: Fault) -> None:
    requests = [request(tokens=TOKENS.roll(shift)) for shift in range(6)]
    with faulty(url, always=fault) as (address, _):
        target = ready(address, url)
        target.servers[0].connection.timeout = 0.2
        found = scores(target, *requests)
    for one, expected in zip(found, own(directory, requests), strict=True):
        assert_same(one, expected)
    assert target.counts.answers == 6
    assert target.counts.failures
    assert all(address in name for name in target.counts.failures)


def test_retry_after_is_honoured(url: str) -> None:
    with faulty(url, "429", retry_after=1) as (address, faults):
        scores(ready(address), request())
    first, second = faults.times
    assert second - first >= 1.0


def test_a_server_that_keeps_failing_is_left_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACK_OFF", 30.0)
    monkeypatch.setattr(connection, "LONGEST_BACK_OFF", 30.0)
    with faulty(url, always="500") as (address, faults):
        target = ready(address, url)

        async def work() -> None:
            for shift in range(8):
                await target.score(request(tokens=TOKENS.roll(shift)))

        during(target, work)
    assert faults.seen <= 1
    assert target.counts.answers == 8


def test_pauses_double_and_failures_side_by_side_are_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACK_OFF", 1.0)
    monkeypatch.setattr(connection, "LONGEST_BACK_OFF", 5.0)
    link = connection.Connection(Endpoint((url,), MODEL), url, connection.HttpCounts())
    monkeypatch.setattr(link._jitter, "uniform", lambda low, high: high)
    pauses = []
    for _ in range(4):
        pauses.append(link._close("status 500", "", None))
        link._close("status 500", "", None)
        monkeypatch.setattr(link, "_closed_until", 0.0)
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 5.0], abs=0.05)
    assert link.counts.failures == {f"{url}: status 500": 8}
    assert link._close("status 429", "", 60.0) == pytest.approx(60.0, abs=0.05)


def test_requests_in_flight_are_bounded(directory: Path) -> None:
    server = Completions(directory, delay=0.01)
    with serve(server) as address:
        scores(ready(address, max_in_flight=3), *(request(tokens=TOKENS.roll(shift)) for shift in range(12)))
    assert server.most_at_once == 3
    assert len(server.asked) == 12


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(AllReplicasFailed, match=r"http://127\.0\.0\.1:9/v1.*ConnectError"):
        scores(engine("http://127.0.0.1:9/v1", deadline=0.5), request())


# ── the key ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    return KEY


def test_the_key_is_sent(directory: Path, key: str) -> None:
    with serve(Completions(directory, key=key)) as address:
        assert scores(engine(address, key_env="TEACHER_KEY"), request())[0].logp is not None
        with pytest.raises(AllReplicasFailed, match=r"status 401.*names no key_env"):
            scores(engine(address), request())


@pytest.mark.parametrize("fault", ["429", "500", "400", "401"])
def test_a_server_that_repeats_the_key_does_not_put_it_into_errors(url: str, key: str, fault: Fault) -> None:
    with faulty(url, always=fault, retry_after=30) as (address, _):
        target = ready(address, key_env="TEACHER_KEY", deadline=0.3)
        with pytest.raises(AllReplicasFailed) as error:
            scores(target, request())
    assert "refused: Bearer …" in str(error.value)
    chain: BaseException | None = error.value
    while chain is not None:
        assert key not in repr(chain)
        chain = chain.__cause__ or chain.__context__
    assert key not in repr(target.counts)


@pytest.mark.parametrize("value", ["", "two words", "line\n", "übel"])
def test_a_key_that_cannot_be_sent_is_refused_without_saying_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TEACHER_KEY", value)
    with pytest.raises(UserError, match="TEACHER_KEY") as error:
        engine("http://127.0.0.1:9/v1", key_env="TEACHER_KEY")
    assert not value or value not in str(error.value)


def test_seconds_count_once(url: str) -> None:
    target = engine(url)
    started = time.perf_counter()
    scores(target, *(request(tokens=TOKENS.roll(shift)) for shift in range(6)))
    assert 0 < target.counts.score_seconds <= time.perf_counter() - started


def test_every_fault_is_tried() -> None:
    assert {*PASSING, *WRONG, *REFUSED} == {*get_args(served.Fault)}
