"""Test the probe: what it finds out about servers that differ, and which servers it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from completions_server import MODEL, Completions, Fault, faulty, serve
from tutelage.engines.http import connection
from tutelage.engines.http import probe as probing
from tutelage.engines.http.probe import STRINGS, ServerFindings, probe, varied_strings
from tutelage.engines.registry import Endpoint
from tutelage.errors import UserError
from tutelage.models.tokenizers import SafeTokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("probed") / "model", seed=1)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(connection, "BACK_OFF", 0.01)
    monkeypatch.setattr(probing, "STRINGS", 60)
    return


def found(directory: Path, address: str, model: str = MODEL, **options: Any) -> ServerFindings:
    tokenizer = SafeTokenizer.load(directory)
    endpoint = Endpoint((address,), model, deadline=3.0)
    return asyncio.run(probe(endpoint, address, tokenizer, **options))


def of(directory: Path, trust_tokenizer: bool = False, **options: Any) -> ServerFindings:
    with serve(Completions(directory, **options)) as address:
        return found(directory, address, trust_tokenizer=trust_tokenizer)


def test_a_server_like_vllm(directory: Path) -> None:
    findings = of(directory, max_logprobs=37, max_model_len=99)
    assert findings.dialect.kind == "prompt_logprobs"
    assert findings.returns_ids
    assert findings.max_top_k == 37
    assert findings.context == 99
    assert findings.difference == 0.0
    assert not findings.processed
    assert findings.tokenizer == "the student's, on 60 strings (by /tokenize)"
    assert findings.abilities().scores == {"sampled", "top_k"}
    assert findings.abilities().max_top_k == 37
    assert not findings.abilities().generates
    lines = "\n".join(findings.lines())
    for said in ("accepted, returned", "prompt_logprobs, raw", "up to 37", "99 tokens", "equal answers"):
        assert said in lines


@pytest.mark.parametrize("limit", [1, 2, 5, 64])
def test_the_largest_k_is_found(directory: Path, limit: int) -> None:
    assert of(directory, max_logprobs=limit).max_top_k == limit


def test_a_server_without_a_limit_names_the_vocabulary(directory: Path) -> None:
    size = len(SafeTokenizer.load(directory).vocabulary)
    assert of(directory, max_logprobs=10**6).max_top_k == size


def test_processed_log_probs_are_noticed(directory: Path) -> None:
    findings = of(directory, processed=True)
    assert findings.processed
    assert "processed; asked for at temperature 1" in "\n".join(findings.lines())


def test_equal_requests_that_differ_are_measured(directory: Path) -> None:
    findings = of(directory, noise=-0.01)
    assert findings.difference == pytest.approx(0.01, rel=0.01)
    assert not findings.processed, "noise is not temperature"
    assert "differ by up to 0.01" in "\n".join(findings.lines())


def test_a_server_that_echoes_ids(directory: Path) -> None:
    findings = of(directory, speaks="echo_ids", tokenize=False, max_logprobs=5)
    assert findings.dialect.kind == "echo"
    assert findings.returns_ids
    assert findings.max_top_k == 5


def test_a_server_that_echoes_strings_gives_no_likeliest_tokens(directory: Path) -> None:
    findings = of(directory, speaks="echo", tokenize=False, max_model_len=None)
    assert (findings.dialect.kind, findings.dialect.extras) == ("echo", False)
    assert not findings.returns_ids
    assert findings.max_top_k == 0
    assert findings.context is None
    assert findings.abilities().scores == {"sampled"}
    assert findings.abilities().max_top_k is None
    assert "by its token strings" in findings.tokenizer
    assert "not by id" in "\n".join(findings.lines())


def test_the_ids_of_answers_stand_in_for_tokenize(directory: Path) -> None:
    assert "by the ids of its answers" in of(directory, tokenize=False).tokenizer


def test_a_server_that_shows_no_tokens_must_be_trusted_by_name(directory: Path) -> None:
    shy: dict[str, Any] = {"speaks": "echo", "tokenize": False, "strings": False}
    with pytest.raises(UserError, match="set trust_tokenizer: true"):
        of(directory, **shy)
    assert "the recipe trusts it" in of(directory, trust_tokenizer=True, **shy).tokenizer


@pytest.mark.parametrize("options", [{}, {"tokenize": False}, {"tokenize": False, "speaks": "echo"}])
def test_another_tokenizer_is_refused(directory: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    other = tiny.save(tmp_path / "other", seed=1)
    tiny.tokenizer(merges=("t h", "a b")).save_pretrained(other)
    with pytest.raises(UserError, match=r"another tokenizer|here and|must be the same"):
        of_other(directory, other, **options)


def of_other(ours: Path, theirs: Path, **options: Any) -> ServerFindings:
    with serve(Completions(theirs, **options)) as address:
        return found(ours, address)


def test_an_unknown_model_is_named_with_those_that_are_there(directory: Path) -> None:
    with (
        serve(Completions(directory)) as address,
        pytest.raises(UserError, match="serves no model 'x'; it serves tiny"),
    ):
        found(directory, address, "x")


def test_a_server_that_is_not_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PATIENCE", 0.2)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        found(directory, "http://127.0.0.1:9/v1")


def test_a_server_without_log_probs_of_prompts_is_refused_with_what_it_said(directory: Path) -> None:
    class Mute(Completions):
        def _logprobs(self, tokens: list[int], k: int, temperature: float) -> dict[str, Any]:
            return {}

    with serve(Mute(directory)) as address, pytest.raises(UserError, match="gives no log-probs") as error:
        found(directory, address)
    assert "the answer has no prompt_logprobs" in str(error.value)
    assert "no logprobs with tokens" in str(error.value)


@pytest.mark.parametrize("fault", ["429", "500", "cut", "truncated"])
def test_the_probe_is_patient(directory: Path, fault: Fault) -> None:
    with serve(Completions(directory)) as upstream, faulty(upstream, fault, fault, retry_after=0) as (address, plan):
        assert found(directory, address).max_top_k == 20
    assert not plan.faults


def test_strings_vary_and_are_always_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "STRINGS", STRINGS)
    tokenizer = SafeTokenizer.load(directory)
    strings = varied_strings(tokenizer)
    assert len(strings) == STRINGS == 200
    assert strings == varied_strings(tokenizer)
    assert len({*strings}) > 190
    assert any("<end>" in string for string in strings)
    assert any(ord(character) > 0x10000 for string in strings for character in string)
